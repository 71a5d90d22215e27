#include "runtime/comm/mpi/mpi_communicator.h"
#include "runtime/comm/mpi/mpi_process.h"
#include "runtime/launch/mpi_plugin_interface.h"
#include "runtime/plugin/build_identity.h"

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
  void fail(const std::string& text) noexcept override { process_->fail(text); }
  std::vector<Heard> beat(const Position& own) noexcept override { return process_->beat(own); }
  std::function<void()> way_to_end_others() const override { return abort_mpi; }
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
  if (host.build != parplan::write_identity(parplan::build_identity())) return nullptr;
  return new parplan::MpiRendezvous(host);
}
