#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/comm/communicator.h"
#include "runtime/launch/flight_recorder.h"

namespace parplan {

// What is known of another process: how many signs of life came from it, and what its rank did
// when it sent the last one.
struct Heard {
  int process = 0;
  std::int64_t signs = 0;
  Position position;
};

// Where the processes of one job meet: they find each other when it is made, exchange small data
// (ids of NCCL, losses, measurements) and learn of each other's failures. One thread of every
// process calls the collectives, all in the same order; any thread may call `check` and `abort` at
// any time.
class Rendezvous {
 public:
  virtual ~Rendezvous() = default;
  virtual int process() const = 0;          // from 0
  virtual int processes() const = 0;
  virtual int local_process() const = 0;    // among the processes of this machine, from 0
  virtual int local_processes() const = 0;  // processes on this machine

  // Everyone contributes bytes (any number) and receives everyone's, by process. Throws RunError,
  // with the reason and its process, once any process has aborted, has been lost, or has left
  // without contributing.
  virtual std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> own) = 0;
  // Throws RunError when a process has aborted or has been lost; returns immediately. For callers
  // that wait for something else.
  virtual void check() = 0;
  // Makes every process's pending and later calls throw RunError with this text. The first one
  // wins. It returns within about a second, whatever the other processes do.
  virtual void fail(const std::string& text) noexcept = 0;
  // The same with "process 2 stopped: <reason>".
  void abort(const std::string& reason) noexcept;

  // Says that this process lives and what its rank does; one thread calls it, several times a
  // second, as long as the job lasts. Returns what is known of the processes that this one hears
  // directly and that have not left: process 0 hears all, the others hear process 0. Does not wait
  // for anybody: where it cannot get through, nothing new is heard.
  virtual std::vector<Heard> beat(const Position& own) noexcept = 0;
  // How a message says where a rank was when its process was last heard of; empty: not at all.
  virtual void describe_positions(const std::function<std::string(int rank, const Position&)>&) {}
  // Ends the other processes by force, where the way of starting them has a means to that. It may
  // be called when the rendezvous is gone, and may not return.
  virtual std::function<void()> way_to_end_others() const { return [] {}; }

  // Makes the transport between CPU ranks; rank r is process r. All processes call it with equal
  // arguments. Null for one process alone, whose ranks are threads: LocalWorld. It lives as long as
  // the rendezvous; its abort aborts the rendezvous and vice versa.
  virtual std::unique_ptr<Communicator> make_communicator(const std::vector<CommunicationGroup>& groups,
                                                          int channels) = 0;
};

// Element `source` of everyone's contribution, for data that only `source` has.
std::vector<std::byte> broadcast(Rendezvous& rendezvous, std::span<const std::byte> own, int source);
// The text that such bytes are.
std::string text_of(std::span<const std::byte> bytes);
// Returns when every process has called it.
void barrier(Rendezvous& rendezvous);

// One process, which has no others to meet.
std::unique_ptr<Rendezvous> alone();

}  // namespace parplan
