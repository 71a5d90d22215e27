#include "runtime/comm/cuda_local/cuda_local_world.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <utility>

#include <fmt/core.h>

#include "planner/base/error.h"
#include "runtime/comm/collective_call.h"
#include "runtime/device/cuda/cuda_backend.h"
#include "runtime/device/cuda/cuda_check.h"
#include "runtime/device/cuda/kernels/ordered_reduction.h"

namespace parplan {
namespace {

constexpr std::int64_t ring_depth = 64;

// A point in a stream that other streams wait for.
class Event {
 public:
  Event() = default;
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }
  // Destruction is not checked: nobody is left to be told of a failure.
  ~Event() {
    if (event_ != nullptr) static_cast<void>(cudaEventDestroy(event_));
  }

  void make() { check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "create an event"); }
  bool made() const { return event_ != nullptr; }
  void record(cudaStream_t stream) const { check(cudaEventRecord(event_, stream), "record an event"); }
  // Later work of `stream` runs after the last record.
  void hold(cudaStream_t stream) const { check(cudaStreamWaitEvent(stream, event_, 0), "wait for an event"); }

 private:
  cudaEvent_t event_ = nullptr;
};

// What a member shows the others; it is written before the member raises `meetings`, and read after
// that was seen. An event is recorded again only after a meeting to which every member comes with
// its waits for the last record submitted.
struct Member {
  std::int64_t meetings = 0;  // guarded by the world's mutex
  CollectiveCall call;
  Elements data;
  Event arrived;   // the data is ready
  Event reduced;   // the member's own chunk is reduced
  Event finished;  // the member has stopped reading other members' data
};

struct Group {
  int id = 0;
  std::vector<int> ranks;
  std::vector<Member> members;
};

// A slot of a ring, reused when the message 64 before was received.
struct Message {
  Elements data;
  Event posted;  // the source's: the data is ready
  Event copied;  // the destination's
};

// Messages of one (source, destination, channel). The first user creates its events.
struct Ring {
  std::int64_t posted = 0;    // guarded by the world's mutex; raised by the source alone
  std::int64_t received = 0;  // likewise, by the destination
  std::array<Message, ring_depth> messages;
};

struct World {
  int ranks = 0;
  int channels = 0;
  std::vector<Group> groups;
  std::vector<Ring> rings;

  std::mutex mutex;
  std::condition_variable changed;
  bool aborted = false;
  int abort_rank = 0;
  std::string abort_reason;

  void throw_if_aborted() const {
    if (aborted) throw RunError(fmt::format("rank {} stopped: {}", abort_rank, abort_reason));
  }

  template <class Ready>
  void wait_until(std::unique_lock<std::mutex>& lock, const Ready& ready) {
    changed.wait(lock, [&] { return aborted || ready(); });
    if (!ready()) throw_if_aborted();
  }

  Ring& ring(int source, int destination, int channel) {
    PARPLAN_ASSERT(
        source >= 0 && source < ranks && destination >= 0 && destination < ranks && channel >= 0 && channel < channels,
        fmt::format("from rank {} to rank {} on channel {}: {} ranks, {} channels", source, destination, channel, ranks,
                    channels));
    return rings[(static_cast<std::size_t>(source) * static_cast<std::size_t>(ranks) +
                  static_cast<std::size_t>(destination)) *
                     static_cast<std::size_t>(channels) +
                 static_cast<std::size_t>(channel)];
  }
};

class CudaLocalCommunicator final : public Communicator {
 public:
  CudaLocalCommunicator(World& world, int rank, CudaBackend& backend);

  int rank() const override { return rank_; }
  int ranks() const override { return world_.ranks; }
  bool in_order() const override { return true; }

  Transfer all_reduce(StreamId stream, int group, Reduction reduction, Elements data) override;
  Transfer reduce_scatter(StreamId stream, int group, Elements data) override;
  Transfer all_gather(StreamId stream, int group, Elements data) override;
  Transfer all_to_all(StreamId stream, int group, Elements from, Elements to) override;
  Transfer broadcast(StreamId stream, int group, Elements data) override;
  Transfer reduce(StreamId stream, int group, Elements data) override;
  Transfer gather(StreamId stream, int group, Elements own, Elements whole) override;
  Transfer scatter(StreamId stream, int group, Elements whole, Elements own) override;
  SendTicket send(StreamId stream, int destination, int channel, Elements data) override;
  Transfer wait_sent(StreamId stream, SendTicket ticket) override;
  Transfer receive(StreamId stream, int source, int channel, Elements data) override;
  void check() override;
  void abort(const std::string& reason) override;

 private:
  // This rank's membership in a group.
  struct Membership {
    Group* group = nullptr;
    int member = 0;
    std::vector<const void*> inputs;  // of all members, for the reductions
    int members() const { return static_cast<int>(group->members.size()); }
    Member& own() const { return group->members[member]; }
  };

  Membership& membership(int group);
  // Records `event` of every member and waits for all of them on the device; on the host it waits
  // only until all have recorded.
  void meet(Membership& m, Event Member::*event, cudaStream_t stream);
  // Shows the others this rank's arguments; the stream continues when all data is ready.
  void arrive(Membership& m, Collective collective, Elements data, cudaStream_t stream);
  void reduce_own_chunk(Membership& m, Reduction reduction, Elements data, cudaStream_t stream);
  void gather(Membership& m, Elements data, cudaStream_t stream);
  Ring& ring_with_events(int source, int destination, int channel);

  World& world_;
  int rank_;
  CudaBackend& backend_;
  std::vector<Membership> memberships_;
};

std::byte* at(const Elements& data, std::int64_t element) {
  return static_cast<std::byte*>(data.data) + element * size_of(data.type);
}

void copy_on_device(void* to, const void* from, std::int64_t bytes, cudaStream_t stream) {
  if (bytes > 0)
    check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToDevice, stream),
          "copy between ranks");
}

CudaLocalCommunicator::CudaLocalCommunicator(World& world, int rank, CudaBackend& backend)
    : world_(world), rank_(rank), backend_(backend) {
  for (Group& group : world.groups) {
    const auto place = std::find(group.ranks.begin(), group.ranks.end(), rank);
    if (place == group.ranks.end()) continue;
    memberships_.push_back({.group = &group,
                            .member = static_cast<int>(place - group.ranks.begin()),
                            .inputs = std::vector<const void*>(group.ranks.size())});
    Member& own = memberships_.back().own();
    for (Event* event : {&own.arrived, &own.reduced, &own.finished})
      if (!event->made()) event->make();
  }
}

CudaLocalCommunicator::Membership& CudaLocalCommunicator::membership(int group) {
  for (Membership& m : memberships_)
    if (m.group->id == group) return m;
  throw InternalError(fmt::format("rank {} is no member of group {}", rank_, group));
}

void CudaLocalCommunicator::meet(Membership& m, Event Member::*event, cudaStream_t stream) {
  (m.own().*event).record(stream);
  {
    std::unique_lock lock(world_.mutex);
    const std::int64_t meeting = ++m.own().meetings;
    world_.changed.notify_all();
    for (const Member& other : m.group->members) world_.wait_until(lock, [&] { return other.meetings >= meeting; });
  }
  for (int i = 0; i < m.members(); ++i)
    if (i != m.member) (m.group->members[i].*event).hold(stream);
}

void CudaLocalCommunicator::arrive(Membership& m, Collective collective, Elements data, cudaStream_t stream) {
  check();
  m.own().call = {.collective = collective, .count = data.count, .type = data.type};
  m.own().data = data;
  meet(m, &Member::arrived, stream);
  for (int i = 0; i < m.members(); ++i)
    check_same_call(m.group->id, rank_, m.own().call, m.group->ranks[i], m.group->members[i].call);
}

void CudaLocalCommunicator::reduce_own_chunk(Membership& m, Reduction reduction, Elements data, cudaStream_t stream) {
  const Chunk own = chunk_of(data.count, m.members(), m.member);
  if (own.begin == own.end) return;
  for (std::size_t i = 0; i < m.inputs.size(); ++i) m.inputs[i] = at(m.group->members[i].data, own.begin);
  (reduction == Reduction::sum ? sum_in_order : max_in_order)(at(data, own.begin), m.inputs, own.end - own.begin,
                                                              data.type, stream);
}

// Copies every other member's chunk from its owner.
void CudaLocalCommunicator::gather(Membership& m, Elements data, cudaStream_t stream) {
  for (int i = 0; i < m.members(); ++i) {
    if (i == m.member) continue;
    const Chunk chunk = chunk_of(data.count, m.members(), i);
    copy_on_device(at(data, chunk.begin), at(m.group->members[i].data, chunk.begin),
                   (chunk.end - chunk.begin) * size_of(data.type), stream);
  }
}

// Three phases between meetings: every member reduces its own chunk, which nobody else reads before
// the second meeting; then all copy the results; then the buffers are free again.
Transfer CudaLocalCommunicator::all_reduce(StreamId stream, int group, Reduction reduction, Elements data) {
  Membership& m = membership(group);
  if (m.members() == 1) return {};
  const cudaStream_t on = backend_.stream(stream);
  arrive(m, all_reduce_of(reduction), data, on);
  reduce_own_chunk(m, reduction, data, on);
  meet(m, &Member::reduced, on);
  gather(m, data, on);
  meet(m, &Member::finished, on);
  return {.sent = all_reduce_bytes(data.count, size_of(data.type), m.members(), m.member), .waited = {}, .moving = {}};
}

Transfer CudaLocalCommunicator::reduce_scatter(StreamId stream, int group, Elements data) {
  Membership& m = membership(group);
  if (m.members() == 1) return {};
  const cudaStream_t on = backend_.stream(stream);
  arrive(m, Collective::reduce_scatter, data, on);
  reduce_own_chunk(m, Reduction::sum, data, on);
  meet(m, &Member::finished, on);
  return {
      .sent = reduce_scatter_bytes(data.count, size_of(data.type), m.members(), m.member), .waited = {}, .moving = {}};
}

Transfer CudaLocalCommunicator::all_gather(StreamId stream, int group, Elements data) {
  Membership& m = membership(group);
  if (m.members() == 1) return {};
  const cudaStream_t on = backend_.stream(stream);
  arrive(m, Collective::all_gather, data, on);
  gather(m, data, on);
  meet(m, &Member::finished, on);
  return {.sent = all_gather_bytes(data.count, size_of(data.type), m.members(), m.member), .waited = {}, .moving = {}};
}

// Every member shows what it sends, and copies its chunk from each of the others.
Transfer CudaLocalCommunicator::all_to_all(StreamId stream, int group, Elements from, Elements to) {
  Membership& m = membership(group);
  const std::int64_t bytes = all_to_all_chunk(from, to, m.members());
  const std::int64_t chunk = from.count / m.members();
  const cudaStream_t on = backend_.stream(stream);
  arrive(m, Collective::all_to_all, from, on);
  for (int i = 0; i < m.members(); ++i)
    copy_on_device(at(to, i * chunk), at(m.group->members[i].data, m.member * chunk), bytes, on);
  meet(m, &Member::finished, on);
  return {.sent = all_to_all_bytes(from.count, size_of(from.type), m.members()), .waited = {}, .moving = {}};
}

// The first member shows what it hands out, and the others copy it; or they show what they have,
// and it copies or adds it.
Transfer CudaLocalCommunicator::broadcast(StreamId stream, int group, Elements data) {
  Membership& m = membership(group);
  if (m.members() == 1) return {};
  const cudaStream_t on = backend_.stream(stream);
  arrive(m, Collective::broadcast, data, on);
  if (m.member > 0)
    copy_on_device(data.data, m.group->members.front().data.data, data.count * size_of(data.type), on);
  meet(m, &Member::finished, on);
  return {.sent = broadcast_bytes(data.count, size_of(data.type), m.members(), m.member), .waited = {}, .moving = {}};
}

Transfer CudaLocalCommunicator::reduce(StreamId stream, int group, Elements data) {
  Membership& m = membership(group);
  if (m.members() == 1) return {};
  const cudaStream_t on = backend_.stream(stream);
  arrive(m, Collective::reduce, data, on);
  if (m.member == 0 && data.count > 0) {
    for (std::size_t i = 0; i < m.inputs.size(); ++i) m.inputs[i] = m.group->members[i].data.data;
    sum_in_order(data.data, m.inputs, data.count, data.type, on);
  }
  meet(m, &Member::finished, on);
  return {.sent = to_first_bytes(data.count, size_of(data.type), m.member), .waited = {}, .moving = {}};
}

Transfer CudaLocalCommunicator::gather(StreamId stream, int group, Elements own, Elements whole) {
  Membership& m = membership(group);
  check_parts(own, whole, m.members(), m.member);
  const cudaStream_t on = backend_.stream(stream);
  arrive(m, Collective::gather, own, on);
  for (int i = 0; i < m.members() && m.member == 0; ++i)
    copy_on_device(at(whole, i * own.count), m.group->members[i].data.data, own.count * size_of(own.type), on);
  meet(m, &Member::finished, on);
  return {.sent = to_first_bytes(own.count, size_of(own.type), m.member), .waited = {}, .moving = {}};
}

Transfer CudaLocalCommunicator::scatter(StreamId stream, int group, Elements whole, Elements own) {
  Membership& m = membership(group);
  check_parts(own, whole, m.members(), m.member);
  const cudaStream_t on = backend_.stream(stream);
  arrive(m, Collective::scatter,
         {.data = m.member == 0 ? whole.data : own.data, .count = own.count, .type = own.type}, on);
  copy_on_device(own.data, at(m.group->members.front().data, m.member * own.count), own.count * size_of(own.type), on);
  meet(m, &Member::finished, on);
  return {.sent = broadcast_bytes(own.count, size_of(own.type), m.members(), m.member), .waited = {}, .moving = {}};
}

Ring& CudaLocalCommunicator::ring_with_events(int source, int destination, int channel) {
  Ring& ring = world_.ring(source, destination, channel);
  const std::lock_guard lock(world_.mutex);
  world_.throw_if_aborted();
  if (ring.messages.back().copied.made()) return ring;
  for (Message& message : ring.messages)
    for (Event* event : {&message.posted, &message.copied})
      if (!event->made()) event->make();
  return ring;
}

SendTicket CudaLocalCommunicator::send(StreamId stream, int destination, int channel, Elements data) {
  Ring& ring = ring_with_events(rank_, destination, channel);
  const std::int64_t number = ring.posted;  // no other thread writes it
  Message& message = ring.messages[number % ring_depth];
  std::unique_lock lock(world_.mutex);
  world_.wait_until(lock, [&] { return number - ring.received < ring_depth; });
  message.data = data;
  message.posted.record(backend_.stream(stream));
  ring.posted = number + 1;
  world_.changed.notify_all();
  return {.destination = destination,
          .channel = channel,
          .number = number,
          .bytes = Bytes(data.count * size_of(data.type))};
}

// A slot that was reused in the meantime holds a later message of the same route: its copy was
// submitted too, and is waited for.
Transfer CudaLocalCommunicator::wait_sent(StreamId stream, SendTicket ticket) {
  const Ring& ring = world_.ring(rank_, ticket.destination, ticket.channel);
  std::unique_lock lock(world_.mutex);
  world_.wait_until(lock, [&] { return ring.received > ticket.number; });
  ring.messages[ticket.number % ring_depth].copied.hold(backend_.stream(stream));
  return {.sent = ticket.bytes, .waited = {}, .moving = {}};
}

Transfer CudaLocalCommunicator::receive(StreamId stream, int source, int channel, Elements data) {
  Ring& ring = ring_with_events(source, rank_, channel);
  const std::int64_t number = ring.received;  // no other thread writes it
  const Message& message = ring.messages[number % ring_depth];
  const cudaStream_t on = backend_.stream(stream);
  std::unique_lock lock(world_.mutex);
  world_.wait_until(lock, [&] { return ring.posted > number; });
  PARPLAN_ASSERT(message.data.count == data.count && message.data.type == data.type,
                 fmt::format("rank {} sends {} {} elements on channel {}, rank {} receives {} {} elements", source,
                             message.data.count, name(message.data.type), channel, rank_, data.count, name(data.type)));
  message.posted.hold(on);
  copy_on_device(data.data, message.data.data, data.count * size_of(data.type), on);
  message.copied.record(on);
  ring.received = number + 1;
  world_.changed.notify_all();
  return {};
}

void CudaLocalCommunicator::check() {
  const std::lock_guard lock(world_.mutex);
  world_.throw_if_aborted();
}

void CudaLocalCommunicator::abort(const std::string& reason) {
  const std::lock_guard lock(world_.mutex);
  if (world_.aborted) return;
  world_.abort_rank = rank_;
  world_.abort_reason = reason;
  world_.aborted = true;
  world_.changed.notify_all();
}

class CudaLocalWorld final : public GpuLocalWorld {
 public:
  CudaLocalWorld(int ranks, const std::vector<CommunicationGroup>& groups, int channels) {
    PARPLAN_ASSERT(ranks > 0 && channels >= 0, fmt::format("{} ranks, {} channels", ranks, channels));
    world_.ranks = ranks;
    world_.channels = channels;
    for (const CommunicationGroup& group : groups) {
      PARPLAN_ASSERT(group.ranks.size() <= most_inputs_in_order,
                     fmt::format("group {} of {} ranks", group.id, group.ranks.size()));
      PARPLAN_ASSERT(
          !group.ranks.empty() && group.ranks.front() >= 0 && group.ranks.back() < ranks &&
              std::adjacent_find(group.ranks.begin(), group.ranks.end(), std::greater_equal<>()) == group.ranks.end(),
          fmt::format("group {} of {} ranks, {} in all", group.id, group.ranks.size(), ranks));
      for (const Group& earlier : world_.groups)
        PARPLAN_ASSERT(earlier.id != group.id, fmt::format("two groups have id {}", group.id));
      world_.groups.push_back(
          {.id = group.id, .ranks = group.ranks, .members = std::vector<Member>(group.ranks.size())});
    }
    world_.rings = std::vector<Ring>(static_cast<std::size_t>(ranks) * static_cast<std::size_t>(ranks) *
                                     static_cast<std::size_t>(channels));
  }

  std::unique_ptr<Communicator> communicator(int rank, Backend& backend) override {
    PARPLAN_ASSERT(rank >= 0 && rank < world_.ranks, fmt::format("rank {} of {}", rank, world_.ranks));
    auto* cuda = dynamic_cast<CudaBackend*>(&backend);
    PARPLAN_ASSERT(cuda != nullptr, fmt::format("rank {} on a GPU has the backend {}", rank, backend.name()));
    return std::make_unique<CudaLocalCommunicator>(world_, rank, *cuda);
  }

 private:
  World world_;
};

}  // namespace

std::unique_ptr<GpuLocalWorld> make_cuda_local_world(int ranks, const std::vector<CommunicationGroup>& groups,
                                                     int channels) {
  return std::make_unique<CudaLocalWorld>(ranks, groups, channels);
}

}  // namespace parplan
