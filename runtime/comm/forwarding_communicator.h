#pragma once

#include <string>

#include "runtime/comm/communicator.h"

namespace parplan {

// Forwards to a communicator that somebody else owns; derived classes do something beside.
class ForwardingCommunicator : public Communicator {
 public:
  explicit ForwardingCommunicator(Communicator& to) : to_(to) {}
  int rank() const override { return to_.rank(); }
  int ranks() const override { return to_.ranks(); }
  bool in_order() const override { return to_.in_order(); }
  Transfer all_reduce(StreamId stream, int group, Reduction reduction, Elements data) override {
    return to_.all_reduce(stream, group, reduction, data);
  }
  Transfer reduce_scatter(StreamId stream, int group, Elements data) override {
    return to_.reduce_scatter(stream, group, data);
  }
  Transfer all_gather(StreamId stream, int group, Elements data) override {
    return to_.all_gather(stream, group, data);
  }
  Transfer all_to_all(StreamId stream, int group, Elements from, Elements to) override {
    return to_.all_to_all(stream, group, from, to);
  }
  Transfer broadcast(StreamId stream, int group, Elements data) override { return to_.broadcast(stream, group, data); }
  Transfer reduce(StreamId stream, int group, Elements data) override { return to_.reduce(stream, group, data); }
  Transfer gather(StreamId stream, int group, Elements own, Elements whole) override {
    return to_.gather(stream, group, own, whole);
  }
  Transfer scatter(StreamId stream, int group, Elements whole, Elements own) override {
    return to_.scatter(stream, group, whole, own);
  }
  SendTicket send(StreamId stream, int destination, int channel, Elements data) override {
    return to_.send(stream, destination, channel, data);
  }
  Transfer wait_sent(StreamId stream, SendTicket ticket) override { return to_.wait_sent(stream, ticket); }
  Transfer receive(StreamId stream, int source, int channel, Elements data) override {
    return to_.receive(stream, source, channel, data);
  }
  void register_memory(void* memory, Bytes bytes) override { to_.register_memory(memory, bytes); }
  void check() override { to_.check(); }
  void abort(const std::string& reason) override { to_.abort(reason); }

 private:
  Communicator& to_;
};

}  // namespace parplan
