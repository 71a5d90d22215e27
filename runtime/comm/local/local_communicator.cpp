#include "runtime/comm/local/local_communicator.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>

#include <fmt/core.h>

#include "planner/base/error.h"
#include "runtime/comm/collective_call.h"
#include "runtime/device/cpu/host_reduction.h"

namespace parplan {

namespace {

using Clock = std::chrono::steady_clock;

// Two cache lines: the neighbour's prefetcher fetches pairs.
constexpr std::size_t apart = 128;
constexpr std::int64_t ring_depth = 64;
// Below this size every member adds up everything itself, which saves a meeting.
constexpr std::int64_t small_count = 1024;

// What a member shows the others. It is written before its `meetings` is raised, and read after
// that was seen.
struct alignas(apart) Member {
  std::atomic<std::int64_t> meetings{0};
  float* data = nullptr;
  CollectiveCall call;
};

struct Group {
  int id = 0;
  std::vector<int> ranks;
  std::vector<Member> members;
};

struct Message {
  const float* data = nullptr;
  std::int64_t count = 0;
};

// Messages of one (source, destination, channel): only the source raises `posted`, only the
// destination raises `received`.
struct Ring {
  alignas(apart) std::atomic<std::int64_t> posted{0};
  alignas(apart) std::atomic<std::int64_t> received{0};
  std::array<Message, ring_depth> messages;
};

}  // namespace

struct LocalWorld::State {
  int ranks = 0;
  int channels = 0;
  bool crowded = false;  // more ranks than cores
  InOrder sum = nullptr;
  InOrder max = nullptr;
  std::vector<Group> groups;
  std::vector<Ring> rings;
  std::atomic<bool> aborted{false};
  std::mutex abort_mutex;
  int abort_rank = 0;
  std::string abort_reason;
  std::vector<std::unique_ptr<Communicator>> communicators;

  Ring& ring(int source, int destination, int channel) {
    PARPLAN_ASSERT(source >= 0 && source < ranks && destination >= 0 && destination < ranks && channel >= 0 &&
                       channel < channels,
                   fmt::format("from rank {} to rank {} on channel {}: {} ranks, {} channels", source, destination,
                               channel, ranks, channels));
    return rings[(static_cast<std::size_t>(source) * ranks + destination) * channels + channel];
  }

  [[noreturn]] void throw_aborted() {
    const std::lock_guard lock(abort_mutex);
    throw RunError(fmt::format("rank {} stopped: {}", abort_rank, abort_reason));
  }

  // Spins while there is a core for every rank, then yields, then naps: a rank that waits through a
  // pipeline's bubble must leave the core to those that work, and with yielding alone the waiting
  // threads would share it among themselves.
  template <class Ready>
  void wait_until(const Ready& ready) {
    const int spins = crowded ? 0 : 4000;
    const int yields = crowded ? 200 : 20000;
    for (int attempt = 0; !ready(); ++attempt) {
      if (aborted.load(std::memory_order_acquire)) throw_aborted();
      if (attempt < spins) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
      } else if (attempt < spins + yields) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      }
    }
  }
};

namespace {

struct Floats {
  float* data = nullptr;
  std::int64_t count = 0;
};
Floats floats(Elements elements) {
  PARPLAN_ASSERT(size_of(elements.type) == sizeof(float),
                 fmt::format("{} between ranks that are threads", name(elements.type)));
  return {static_cast<float*>(elements.data), elements.count};
}

class LocalCommunicator final : public Communicator {
 public:
  LocalCommunicator(LocalWorld::State& state, int rank);

  int rank() const override { return rank_; }
  int ranks() const override { return state_.ranks; }

  bool in_order() const override { return true; }
  Transfer all_reduce(StreamId stream, int group, Reduction reduction, Elements elements) override;
  Transfer reduce_scatter(StreamId stream, int group, Elements elements) override;
  Transfer all_gather(StreamId stream, int group, Elements elements) override;
  Transfer all_to_all(StreamId stream, int group, Elements from, Elements to) override;
  Transfer broadcast(StreamId stream, int group, Elements data) override;
  Transfer reduce(StreamId stream, int group, Elements data) override;
  Transfer gather(StreamId stream, int group, Elements own, Elements whole) override;
  Transfer scatter(StreamId stream, int group, Elements whole, Elements own) override;
  SendTicket send(StreamId stream, int destination, int channel, Elements elements) override;
  Transfer wait_sent(StreamId stream, SendTicket ticket) override;
  Transfer receive(StreamId stream, int source, int channel, Elements elements) override;
  void check() override { check_not_aborted(); }
  void abort(const std::string& reason) override;

 private:
  // This rank's membership in a group.
  struct Membership {
    Group* group = nullptr;
    int member = 0;
    std::vector<const float*> inputs;  // of all members, for the reductions
    int members() const { return static_cast<int>(group->members.size()); }
  };

  Membership& membership(int group);
  void meet(Membership& m);
  // Shows the others this rank's arguments and waits for all; returns the time when all had
  // arrived.
  Clock::time_point arrive(Membership& m, Collective collective, float* data, std::int64_t count);
  void point_inputs_at(Membership& m, std::int64_t element);
  void gather(Membership& m, float* data, std::int64_t count);
  void check_not_aborted();

  LocalWorld::State& state_;
  int rank_;
  std::vector<Membership> memberships_;
};

LocalCommunicator::LocalCommunicator(LocalWorld::State& state, int rank) : state_(state), rank_(rank) {
  for (Group& group : state.groups) {
    const auto at = std::find(group.ranks.begin(), group.ranks.end(), rank);
    if (at == group.ranks.end()) continue;
    memberships_.push_back({.group = &group,
                            .member = static_cast<int>(at - group.ranks.begin()),
                            .inputs = std::vector<const float*>(group.ranks.size())});
  }
}

LocalCommunicator::Membership& LocalCommunicator::membership(int group) {
  for (Membership& m : memberships_)
    if (m.group->id == group) return m;
  throw InternalError(fmt::format("rank {} is no member of group {}", rank_, group));
}

void LocalCommunicator::check_not_aborted() {
  if (state_.aborted.load(std::memory_order_acquire)) state_.throw_aborted();
}

void LocalCommunicator::meet(Membership& m) {
  std::vector<Member>& members = m.group->members;
  std::atomic<std::int64_t>& own = members[m.member].meetings;
  const std::int64_t meeting = own.load(std::memory_order_relaxed) + 1;
  own.store(meeting, std::memory_order_release);
  for (const Member& other : members)
    state_.wait_until([&] { return other.meetings.load(std::memory_order_acquire) >= meeting; });
}

Clock::time_point LocalCommunicator::arrive(Membership& m, Collective collective, float* data, std::int64_t count) {
  check_not_aborted();
  Member& own = m.group->members[m.member];
  own.data = data;
  own.call = {.collective = collective, .count = count};
  meet(m);
  for (int i = 0; i < m.members(); ++i)
    check_same_call(m.group->id, rank_, own.call, m.group->ranks[i], m.group->members[i].call);
  return Clock::now();
}

void LocalCommunicator::point_inputs_at(Membership& m, std::int64_t element) {
  for (std::size_t i = 0; i < m.inputs.size(); ++i) m.inputs[i] = m.group->members[i].data + element;
}

// Copies every other member's chunk from its owner.
void LocalCommunicator::gather(Membership& m, float* data, std::int64_t count) {
  for (int i = 0; i < m.members(); ++i) {
    if (i == m.member) continue;
    const Chunk chunk = chunk_of(count, m.members(), i);
    if (chunk.begin == chunk.end) continue;
    std::memcpy(data + chunk.begin, m.group->members[i].data + chunk.begin,
                static_cast<std::size_t>(chunk.end - chunk.begin) * sizeof(float));
  }
}

// Three phases between meetings: every member adds up its own chunk, which nobody else reads before
// the second meeting; then all copy the sums; then the buffers are free again.
Transfer LocalCommunicator::all_reduce(StreamId, int group, Reduction reduction, Elements elements) {
  const auto [data, count] = floats(elements);
  Membership& m = membership(group);
  if (m.members() == 1) return {};
  const bool sum = reduction == Reduction::sum;
  const InOrder combine = sum ? state_.sum : state_.max;
  const auto begin = Clock::now();
  const auto met = arrive(m, all_reduce_of(reduction), data, count);
  if (count <= small_count) {
    alignas(64) std::array<float, small_count> result;
    point_inputs_at(m, 0);
    combine(result.data(), m.inputs.data(), m.members(), count);
    meet(m);
    std::copy_n(result.data(), count, data);
  } else {
    const Chunk own = chunk_of(count, m.members(), m.member);
    point_inputs_at(m, own.begin);
    combine(data + own.begin, m.inputs.data(), m.members(), own.end - own.begin);
    meet(m);
    gather(m, data, count);
    meet(m);
  }
  return carried_out_since(begin, met, all_reduce_bytes(count, sizeof(float), m.members(), m.member));
}

Transfer LocalCommunicator::reduce_scatter(StreamId, int group, Elements elements) {
  const auto [data, count] = floats(elements);
  Membership& m = membership(group);
  if (m.members() == 1) return {};
  const auto begin = Clock::now();
  const auto met = arrive(m, Collective::reduce_scatter, data, count);
  const Chunk own = chunk_of(count, m.members(), m.member);
  point_inputs_at(m, own.begin);
  state_.sum(data + own.begin, m.inputs.data(), m.members(), own.end - own.begin);
  meet(m);
  return carried_out_since(begin, met, reduce_scatter_bytes(count, sizeof(float), m.members(), m.member));
}

Transfer LocalCommunicator::all_gather(StreamId, int group, Elements elements) {
  const auto [data, count] = floats(elements);
  Membership& m = membership(group);
  if (m.members() == 1) return {};
  const auto begin = Clock::now();
  const auto met = arrive(m, Collective::all_gather, data, count);
  gather(m, data, count);
  meet(m);
  return carried_out_since(begin, met, all_gather_bytes(count, sizeof(float), m.members(), m.member));
}

// Every member shows what it sends, and copies its chunk from each of the others.
Transfer LocalCommunicator::all_to_all(StreamId, int group, Elements from, Elements to) {
  const auto [data, count] = floats(from);
  float* received = floats(to).data;
  Membership& m = membership(group);
  const auto bytes = static_cast<std::size_t>(all_to_all_chunk(from, to, m.members()));
  const std::int64_t chunk = count / m.members();
  const auto begin = Clock::now();
  const auto met = arrive(m, Collective::all_to_all, data, count);
  for (int i = 0; i < m.members() && chunk > 0; ++i)
    std::memcpy(received + i * chunk, m.group->members[i].data + m.member * chunk, bytes);
  meet(m);
  return carried_out_since(begin, met, all_to_all_bytes(count, sizeof(float), m.members()));
}

// The first member shows what it hands out, and the others copy it; or they show what they have,
// and it copies or adds it.
Transfer LocalCommunicator::broadcast(StreamId, int group, Elements elements) {
  const auto [data, count] = floats(elements);
  Membership& m = membership(group);
  if (m.members() == 1) return {};
  const auto begin = Clock::now();
  const auto met = arrive(m, Collective::broadcast, data, count);
  if (m.member > 0 && count > 0)
    std::memcpy(data, m.group->members.front().data, static_cast<std::size_t>(count) * sizeof(float));
  meet(m);
  return carried_out_since(begin, met, broadcast_bytes(count, sizeof(float), m.members(), m.member));
}

Transfer LocalCommunicator::reduce(StreamId, int group, Elements elements) {
  const auto [data, count] = floats(elements);
  Membership& m = membership(group);
  if (m.members() == 1) return {};
  const auto begin = Clock::now();
  const auto met = arrive(m, Collective::reduce, data, count);
  if (m.member == 0) {
    point_inputs_at(m, 0);
    state_.sum(data, m.inputs.data(), m.members(), count);
  }
  meet(m);
  return carried_out_since(begin, met, to_first_bytes(count, sizeof(float), m.member));
}

Transfer LocalCommunicator::gather(StreamId, int group, Elements own, Elements whole) {
  const auto [data, count] = floats(own);
  float* all = floats(whole).data;
  Membership& m = membership(group);
  check_parts(own, whole, m.members(), m.member);
  const auto begin = Clock::now();
  const auto met = arrive(m, Collective::gather, data, count);
  for (int i = 0; i < m.members() && m.member == 0 && count > 0; ++i)
    std::memcpy(all + i * count, m.group->members[i].data, static_cast<std::size_t>(count) * sizeof(float));
  meet(m);
  return carried_out_since(begin, met, to_first_bytes(count, sizeof(float), m.member));
}

Transfer LocalCommunicator::scatter(StreamId, int group, Elements whole, Elements own) {
  const auto [data, count] = floats(own);
  Membership& m = membership(group);
  check_parts(own, whole, m.members(), m.member);
  const auto begin = Clock::now();
  const auto met = arrive(m, Collective::scatter, m.member == 0 ? floats(whole).data : data, count);
  if (count > 0)
    std::memcpy(data, m.group->members.front().data + m.member * count,
                static_cast<std::size_t>(count) * sizeof(float));
  meet(m);
  return carried_out_since(begin, met, broadcast_bytes(count, sizeof(float), m.members(), m.member));
}

SendTicket LocalCommunicator::send(StreamId, int destination, int channel, Elements elements) {
  const auto [data, count] = floats(elements);
  check_not_aborted();
  Ring& ring = state_.ring(rank_, destination, channel);
  const std::int64_t number = ring.posted.load(std::memory_order_relaxed);
  state_.wait_until([&] { return number - ring.received.load(std::memory_order_acquire) < ring_depth; });
  ring.messages[number % ring_depth] = {.data = data, .count = count};
  ring.posted.store(number + 1, std::memory_order_release);
  return {.destination = destination,
          .channel = channel,
          .number = number,
          .bytes = Bytes(count * static_cast<std::int64_t>(sizeof(float)))};
}

Transfer LocalCommunicator::wait_sent(StreamId, SendTicket ticket) {
  const auto begin = Clock::now();
  const Ring& ring = state_.ring(rank_, ticket.destination, ticket.channel);
  state_.wait_until([&] { return ring.received.load(std::memory_order_acquire) > ticket.number; });
  return waited_since(begin, ticket.bytes);
}

Transfer LocalCommunicator::receive(StreamId, int source, int channel, Elements elements) {
  const auto [data, count] = floats(elements);
  check_not_aborted();
  const auto begin = Clock::now();
  Ring& ring = state_.ring(source, rank_, channel);
  const std::int64_t number = ring.received.load(std::memory_order_relaxed);
  state_.wait_until([&] { return ring.posted.load(std::memory_order_acquire) > number; });
  const auto met = Clock::now();
  const Message message = ring.messages[number % ring_depth];
  PARPLAN_ASSERT(message.count == count, fmt::format("rank {} sends {} elements on channel {}, rank {} receives {}",
                                                     source, message.count, channel, rank_, count));
  if (count > 0) std::memcpy(data, message.data, static_cast<std::size_t>(count) * sizeof(float));
  ring.received.store(number + 1, std::memory_order_release);
  return carried_out_since(begin, met, Bytes(0));
}

void LocalCommunicator::abort(const std::string& reason) {
  const std::lock_guard lock(state_.abort_mutex);
  if (state_.aborted.load(std::memory_order_relaxed)) return;
  state_.abort_rank = rank_;
  state_.abort_reason = reason;
  state_.aborted.store(true, std::memory_order_release);
}

}  // namespace

LocalWorld::LocalWorld(int ranks, const std::vector<CommunicationGroup>& groups, int channels)
    : state_(std::make_unique<State>()) {
  PARPLAN_ASSERT(ranks > 0 && channels >= 0, fmt::format("{} ranks, {} channels", ranks, channels));
  state_->ranks = ranks;
  state_->channels = channels;
  state_->crowded = static_cast<unsigned>(ranks) > std::thread::hardware_concurrency();
  state_->sum = host_sum_in_order();
  state_->max = host_max_in_order();
  for (const CommunicationGroup& group : groups) {
    PARPLAN_ASSERT(!group.ranks.empty() && group.ranks.front() >= 0 && group.ranks.back() < ranks &&
                       std::adjacent_find(group.ranks.begin(), group.ranks.end(), std::greater_equal<>()) ==
                           group.ranks.end(),
                   fmt::format("group {} of {} ranks, {} in all", group.id, group.ranks.size(), ranks));
    for (const Group& earlier : state_->groups)
      PARPLAN_ASSERT(earlier.id != group.id, fmt::format("two groups have id {}", group.id));
    state_->groups.push_back(
        {.id = group.id, .ranks = group.ranks, .members = std::vector<Member>(group.ranks.size())});
  }
  state_->rings = std::vector<Ring>(static_cast<std::size_t>(ranks) * ranks * channels);
  for (int rank = 0; rank < ranks; ++rank)
    state_->communicators.push_back(std::make_unique<LocalCommunicator>(*state_, rank));
}

LocalWorld::~LocalWorld() = default;

Communicator& LocalWorld::communicator(int rank) { return *state_->communicators.at(static_cast<std::size_t>(rank)); }

}  // namespace parplan
