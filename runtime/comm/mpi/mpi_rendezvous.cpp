#include <cstring>

#include "runtime/comm/mpi/mpi_communicator.h"
#include "runtime/comm/mpi/mpi_process.h"
#include "runtime/launch/mpi_plugin_interface.h"

namespace parplan {
namespace {

class MpiRendezvous final : public Rendezvous {
 public:
  explicit MpiRendezvous(const MpiHost& host) : host_(host), process_(std::make_shared<MpiProcess>()) {}

  int process() const override { return process_->process(); }
  int processes() const override { return process_->processes(); }
  int local_process() const override { return process_->local_process(); }
  int local_processes() const override { return process_->local_processes(); }
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> own) override {
    return process_->all_gather(own);
  }
  void check() override { process_->check(); }
  void abort(const std::string& reason) noexcept override {
    process_->abort("process " + std::to_string(process()) + " stopped: " + reason);
  }
  std::unique_ptr<Communicator> make_communicator(const std::vector<CommunicationGroup>& groups,
                                                  int channels) override {
    return make_mpi_communicator(process_, host_, groups, channels);
  }

 private:
  MpiHost host_;
  std::shared_ptr<MpiProcess> process_;
};

}  // namespace
}  // namespace parplan

// The only symbol that the plugin exports (exports.map).
extern "C" [[gnu::visibility("default")]] parplan::Rendezvous* parplan_make_mpi_rendezvous(
    const parplan::MpiHost& host) {
  if (std::strcmp(host.version, PARPLAN_VERSION) != 0) return nullptr;
  return new parplan::MpiRendezvous(host);
}
