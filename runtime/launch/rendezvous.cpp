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
    if (failure_) throw RunError(*failure_);
  }
  void fail(const std::string& text) noexcept override {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = text;
  }
  std::vector<Heard> beat(const Position&) noexcept override { return {}; }
  std::unique_ptr<Communicator> make_communicator(const std::vector<CommunicationGroup>&, int) override {
    return nullptr;
  }

 private:
  std::mutex mutex_;
  std::optional<std::string> failure_;
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

void Rendezvous::abort(const std::string& reason) noexcept {
  // Where there is no memory for words, the reason alone has to do.
  std::string text;
  try {
    text = fmt::format("process {} stopped: {}", process(), reason);
  } catch (const std::exception&) {
    fail(reason);
    return;
  }
  fail(text);
}

void barrier(Rendezvous& rendezvous) { rendezvous.all_gather({}); }

std::unique_ptr<Rendezvous> alone() { return std::make_unique<Alone>(); }

}  // namespace parplan
