#include "runtime/launch/rendezvous.h"

#include <mutex>
#include <optional>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {
namespace {

class Alone final : public Rendezvous {
 public:
  int process() const override { return 0; }
  int processes() const override { return 1; }
  int local_process() const override { return 0; }
  int local_processes() const override { return 1; }

  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> own) override {
    check();
    return {std::vector<std::byte>(own.begin(), own.end())};
  }
  void check() override {
    const std::lock_guard lock(mutex_);
    if (reason_) throw RunError(fmt::format("process 0 stopped: {}", *reason_));
  }
  void abort(const std::string& reason) noexcept override {
    const std::lock_guard lock(mutex_);
    if (!reason_) reason_ = reason;
  }
  std::unique_ptr<Communicator> make_communicator(const std::vector<CommunicationGroup>&, int) override {
    return nullptr;
  }

 private:
  std::mutex mutex_;
  std::optional<std::string> reason_;
};

}  // namespace

std::vector<std::byte> broadcast(Rendezvous& rendezvous, std::span<const std::byte> own, int source) {
  PARPLAN_ASSERT(source >= 0 && source < rendezvous.processes(),
                 fmt::format("process {} of {}", source, rendezvous.processes()));
  const bool mine = rendezvous.process() == source;
  return std::move(rendezvous.all_gather(mine ? own : std::span<const std::byte>())[source]);
}

std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void barrier(Rendezvous& rendezvous) { rendezvous.all_gather({}); }

std::unique_ptr<Rendezvous> alone() { return std::make_unique<Alone>(); }

}  // namespace parplan
