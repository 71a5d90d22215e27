#include "runtime/comm/nccl/nccl_communicator.h"

#include <cuda_runtime.h>
#include <nccl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include <fmt/core.h>
#include <fmt/ranges.h>

#include "planner/base/error.h"
#include "runtime/comm/collective_call.h"
#include "runtime/comm/nccl/communicator_splits.h"
#include "runtime/comm/nccl/nccl_check.h"
#include "runtime/device/cuda/cuda_check.h"

namespace parplan {
namespace {

using namespace std::chrono_literals;

constexpr std::int64_t outstanding_sends = 64;
// How often communicators are asked for asynchronous errors. No rank waits for this: it delays only
// the message.
constexpr auto watch_interval = 100ms;
// How long an abort waits for a pending call of NCCL before it aborts under it, which ends a call
// that hangs.
constexpr auto call_patience = 500ms;

// State shared by the ranks of one job that are threads of this process.
struct Job {
  std::mutex mutex;
  std::condition_variable changed;
  bool failed = false;
  int failed_rank = 0;
  std::string reason;

  void fail(int rank, const std::string& why) {
    const std::lock_guard lock(mutex);
    if (failed) return;
    failed_rank = rank;
    reason = why;
    failed = true;
    changed.notify_all();
  }
  void throw_if_failed() {
    const std::lock_guard lock(mutex);
    if (failed) throw RunError(fmt::format("rank {} stopped: {}", failed_rank, reason));
  }
};

std::shared_ptr<Job> job_of(const std::vector<std::byte>& id) {
  static std::mutex mutex;
  static std::map<std::vector<std::byte>, std::weak_ptr<Job>> jobs;
  const std::lock_guard lock(mutex);
  std::erase_if(jobs, [](const auto& entry) { return entry.second.expired(); });
  std::shared_ptr<Job> job = jobs[id].lock();
  if (job == nullptr) jobs[id] = job = std::make_shared<Job>();
  return job;
}

// One communicator of NCCL: of all ranks, of a group or of a route.
struct Link {
  std::string name;  // for messages: "group 5 of ranks 0, 2"
  ncclComm_t nccl = nullptr;
  std::mutex calls;  // held during every call
  std::vector<void*> registrations;
};

struct GroupLink {
  int id = 0;
  int member = 0;
  int members = 0;
  Link* link = nullptr;  // null when the rank is alone
};

struct RouteLink {
  SendRoute route;
  Link* link = nullptr;
  // Events of the source: event `number % outstanding_sends` follows the send of that number.
  std::vector<cudaEvent_t> sent;
  std::int64_t sends = 0;
};

ncclDataType_t nccl_type(DataType type) {
  switch (type) {
    case DataType::fp32:
    case DataType::tf32: return ncclFloat32;
    case DataType::bf16: return ncclBfloat16;
    case DataType::fp16: return ncclFloat16;
    case DataType::int32: return ncclInt32;
    case DataType::uint8: return ncclUint8;
    case DataType::fp8: break;  // bf16 in memory
  }
  throw InternalError("no such type");
}

void* at(const Elements& data, std::int64_t element) {
  return static_cast<std::byte*>(data.data) + element * size_of(data.type);
}

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(const std::vector<std::byte>& id, int rank, int ranks, const std::vector<CommunicationGroup>& groups,
                   const std::vector<SendRoute>& routes, CudaBackend& backend);
  ~NcclCommunicator() override;

  int rank() const override { return rank_; }
  int ranks() const override { return ranks_; }
  bool in_order() const override { return false; }

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
  void register_memory(void* memory, Bytes bytes) override;
  void check() override { job_->throw_if_failed(); }
  void abort(const std::string& reason) override { job_->fail(rank_, reason); }

 private:
  void connect(const std::vector<std::byte>& id, const std::vector<CommunicationGroup>& groups,
               const std::vector<SendRoute>& routes);
  void make_group_links(const std::vector<CommunicationGroup>& groups);
  void make_route_links(const std::vector<SendRoute>& routes);
  void open_routes();
  // One link for each set that holds this rank; the other entries are null. All ranks call it with
  // the same sets.
  std::vector<Link*> split(const std::vector<std::vector<int>>& sets,
                           const std::function<std::string(std::size_t)>& name_of);
  void release();

  GroupLink& group_link(int group);
  RouteLink& route_link(const SendRoute& route);
  // Calls NCCL unless the job has failed; a failure becomes the job's.
  template <class Operation>
  void issue(Link& link, const char* what, const Operation& operation);

  void watch();
  void abort_links();

  int rank_;
  int ranks_;
  CudaBackend& backend_;
  std::shared_ptr<Job> job_;
  std::vector<std::unique_ptr<Link>> links_;  // the first is that of all ranks
  std::vector<GroupLink> groups_;
  std::vector<RouteLink> routes_;
  // The memory with which routes are opened. It is kept, because releasing memory waits for all
  // work of the GPU, including that of other ranks that share it.
  void* opening_ = nullptr;
  bool stopping_ = false;  // guarded by the job's mutex
  bool aborted_ = false;   // owned by the watcher until it was joined
  std::thread watcher_;
};

template <class Operation>
void NcclCommunicator::issue(Link& link, const char* what, const Operation& operation) {
  ncclResult_t result = ncclSuccess;
  std::string text;
  {
    const std::lock_guard lock(link.calls);
    job_->throw_if_failed();
    result = operation(link.nccl);
  }
  if (result == ncclSuccess) return;
  // Without the communicator, which may have been aborted during the call.
  job_->fail(rank_, nccl_error_text(result, nullptr, fmt::format("NCCL, {}, {}", what, link.name)));
  job_->throw_if_failed();
}

NcclCommunicator::NcclCommunicator(const std::vector<std::byte>& id, int rank, int ranks,
                                   const std::vector<CommunicationGroup>& groups, const std::vector<SendRoute>& routes,
                                   CudaBackend& backend)
    : rank_(rank), ranks_(ranks), backend_(backend), job_(job_of(id)) {
  try {
    connect(id, groups, routes);
    watcher_ = std::thread([this] { watch(); });
    open_routes();
  } catch (const std::exception& error) {
    job_->fail(rank_, error.what());
    release();
    throw;
  }
}

NcclCommunicator::~NcclCommunicator() { release(); }

void NcclCommunicator::connect(const std::vector<std::byte>& id, const std::vector<CommunicationGroup>& groups,
                               const std::vector<SendRoute>& routes) {
  PARPLAN_ASSERT(id.size() == sizeof(ncclUniqueId), fmt::format("an id of {} bytes", id.size()));
  PARPLAN_ASSERT(rank_ >= 0 && rank_ < ranks_, fmt::format("rank {} of {}", rank_, ranks_));
  if (ranks_ > 1) {
    ncclUniqueId unique;
    std::memcpy(&unique, id.data(), sizeof(unique));
    // Blocking calls: the alternative starts a thread for every call (NCCL 2.28, group.cc).
    // Communicators share nothing: those that share take turns on the device, whatever their
    // streams (enqueue.cc, ncclLaunchPrepare: sharedRes->deviceStream).
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 1;
    config.splitShare = 0;
    auto world = std::make_unique<Link>();
    world->name = "group of all ranks";
    nccl_check(ncclCommInitRankConfig(&world->nccl, ranks_, unique, rank_, &config), nullptr,
               fmt::format("NCCL, connecting rank {} of {}", rank_, ranks_));
    links_.push_back(std::move(world));
  }
  make_group_links(groups);
  make_route_links(routes);
}

std::vector<Link*> NcclCommunicator::split(const std::vector<std::vector<int>>& sets,
                                           const std::function<std::string(std::size_t)>& name_of) {
  std::vector<Link*> made(sets.size());
  const std::vector<int> round_of = split_rounds(sets, ranks_);
  const int rounds = round_of.empty() ? 0 : *std::max_element(round_of.begin(), round_of.end()) + 1;
  for (int round = 0; round < rounds; ++round) {
    int color = NCCL_SPLIT_NOCOLOR;
    int key = 0;
    for (std::size_t i = 0; i < sets.size(); ++i) {
      const auto place = std::find(sets[i].begin(), sets[i].end(), rank_);
      if (round_of[i] != round || place == sets[i].end()) continue;
      color = static_cast<int>(i);
      key = static_cast<int>(place - sets[i].begin());
    }
    auto link = std::make_unique<Link>();
    if (color >= 0) link->name = name_of(static_cast<std::size_t>(color));
    nccl_check(ncclCommSplit(links_.front()->nccl, color, key, &link->nccl, nullptr), links_.front()->nccl,
               fmt::format("NCCL, rank {} connecting {}", rank_, color >= 0 ? link->name : "others"));
    if (color < 0) continue;
    made[color] = link.get();
    links_.push_back(std::move(link));
  }
  return made;
}

void NcclCommunicator::make_group_links(const std::vector<CommunicationGroup>& groups) {
  std::vector<std::vector<int>> sets;
  std::vector<const CommunicationGroup*> split_groups;
  for (const CommunicationGroup& group : groups) {
    PARPLAN_ASSERT(
        !group.ranks.empty() && group.ranks.front() >= 0 && group.ranks.back() < ranks_ &&
            std::adjacent_find(group.ranks.begin(), group.ranks.end(), std::greater_equal<>()) == group.ranks.end(),
        fmt::format("group {} of {} ranks, {} in all", group.id, group.ranks.size(), ranks_));
    const auto place = std::find(group.ranks.begin(), group.ranks.end(), rank_);
    if (place != group.ranks.end()) {
      for (const GroupLink& earlier : groups_)
        PARPLAN_ASSERT(earlier.id != group.id, fmt::format("two groups have id {}", group.id));
      groups_.push_back(
          {.id = group.id,
           .member = static_cast<int>(place - group.ranks.begin()),
           .members = static_cast<int>(group.ranks.size()),
           .link = static_cast<int>(group.ranks.size()) == ranks_ && ranks_ > 1 ? links_.front().get() : nullptr});
    }
    if (group.ranks.size() == 1 || static_cast<int>(group.ranks.size()) == ranks_) continue;
    sets.push_back(group.ranks);
    split_groups.push_back(&group);
  }
  const std::vector<Link*> made = split(sets, [&](std::size_t i) {
    return fmt::format("group {} of ranks {}", split_groups[i]->id, fmt::join(split_groups[i]->ranks, ", "));
  });
  for (std::size_t i = 0; i < made.size(); ++i)
    if (made[i] != nullptr) group_link(split_groups[i]->id).link = made[i];
}

void NcclCommunicator::make_route_links(const std::vector<SendRoute>& routes) {
  std::vector<std::vector<int>> sets;
  for (const SendRoute& route : routes) {
    PARPLAN_ASSERT(route.source >= 0 && route.source < ranks_ && route.destination >= 0 && route.destination < ranks_ &&
                       route.source != route.destination,
                   fmt::format("a route from rank {} to rank {}, {} in all", route.source, route.destination, ranks_));
    sets.push_back({route.source, route.destination});
  }
  const std::vector<Link*> made = split(sets, [&](std::size_t i) {
    return fmt::format("rank {} to rank {} on channel {}", routes[i].source, routes[i].destination, routes[i].channel);
  });
  for (const std::unique_ptr<Link>& link : links_) {  // in the order of the rounds
    const auto place = std::find(made.begin(), made.end(), link.get());
    if (place == made.end()) continue;
    const SendRoute& route = routes[place - made.begin()];
    routes_.push_back({.route = route, .link = link.get(), .sent = {}, .sends = 0});
    if (route.source != rank_) continue;
    for (std::int64_t event = 0; event < outstanding_sends; ++event)
      parplan::check(cudaEventCreateWithFlags(&routes_.back().sent.emplace_back(), cudaEventDisableTiming),
                     "create an event");
  }
}

// NCCL connects two ranks in their first send and receive, and both wait for each other there.
// Routes are therefore opened here, in the order of the rounds, in which no rank has two: later
// sends return immediately, in whatever order ranks submit them.
void NcclCommunicator::open_routes() {
  if (routes_.empty()) return;
  opening_ = backend_.allocate(Bytes(sizeof(std::int32_t)));
  const cudaStream_t stream = backend_.stream(0);
  for (RouteLink& route : routes_)
    issue(*route.link, "open", [&](ncclComm_t nccl) {
      return route.route.source == rank_ ? ncclSend(opening_, 1, ncclInt32, 1, nccl, stream)
                                         : ncclRecv(opening_, 1, ncclInt32, 0, nccl, stream);
    });
  backend_.synchronize();
}

GroupLink& NcclCommunicator::group_link(int group) {
  for (GroupLink& link : groups_)
    if (link.id == group) return link;
  throw InternalError(fmt::format("rank {} is no member of group {}", rank_, group));
}

RouteLink& NcclCommunicator::route_link(const SendRoute& route) {
  for (RouteLink& link : routes_)
    if (link.route == route) return link;
  throw InternalError(
      fmt::format("no route from rank {} to rank {} on channel {}", route.source, route.destination, route.channel));
}

Transfer NcclCommunicator::all_reduce(StreamId stream, int group, Reduction reduction, Elements data) {
  const GroupLink& g = group_link(group);
  if (g.members == 1 || data.count == 0) return {};
  issue(*g.link, "all_reduce", [&](ncclComm_t nccl) {
    return ncclAllReduce(data.data, data.data, static_cast<std::size_t>(data.count), nccl_type(data.type),
                         reduction == Reduction::sum ? ncclSum : ncclMax, nccl, backend_.stream(stream));
  });
  return {.sent = all_reduce_bytes(data.count, size_of(data.type), g.members, g.member), .waited = {}, .moving = {}};
}

// NCCL's own reduce-scatter and all-gather have equal chunks; a count that is no multiple of the
// members is moved chunk by chunk, in one group of calls.
template <class Move>
ncclResult_t for_each_chunk(std::int64_t count, int members, const Move& move) {
  ncclResult_t result = ncclGroupStart();
  for (int member = 0; member < members && result == ncclSuccess; ++member)
    if (const Chunk chunk = chunk_of(count, members, member); chunk.begin < chunk.end) result = move(chunk, member);
  const ncclResult_t ended = ncclGroupEnd();
  return result == ncclSuccess ? ended : result;
}

Transfer NcclCommunicator::reduce_scatter(StreamId stream, int group, Elements data) {
  const GroupLink& g = group_link(group);
  if (g.members == 1 || data.count == 0) return {};
  const cudaStream_t on = backend_.stream(stream);
  const ncclDataType_t type = nccl_type(data.type);
  issue(*g.link, "reduce_scatter", [&](ncclComm_t nccl) {
    if (data.count % g.members == 0)
      return ncclReduceScatter(data.data, at(data, chunk_of(data.count, g.members, g.member).begin),
                               static_cast<std::size_t>(data.count / g.members), type, ncclSum, nccl, on);
    return for_each_chunk(data.count, g.members, [&](const Chunk& chunk, int member) {
      void* place = at(data, chunk.begin);
      return ncclReduce(place, place, static_cast<std::size_t>(chunk.end - chunk.begin), type, ncclSum, member, nccl,
                        on);
    });
  });
  return {
      .sent = reduce_scatter_bytes(data.count, size_of(data.type), g.members, g.member), .waited = {}, .moving = {}};
}

Transfer NcclCommunicator::all_gather(StreamId stream, int group, Elements data) {
  const GroupLink& g = group_link(group);
  if (g.members == 1 || data.count == 0) return {};
  const cudaStream_t on = backend_.stream(stream);
  const ncclDataType_t type = nccl_type(data.type);
  issue(*g.link, "all_gather", [&](ncclComm_t nccl) {
    if (data.count % g.members == 0)
      return ncclAllGather(at(data, chunk_of(data.count, g.members, g.member).begin), data.data,
                           static_cast<std::size_t>(data.count / g.members), type, nccl, on);
    return for_each_chunk(data.count, g.members, [&](const Chunk& chunk, int member) {
      void* place = at(data, chunk.begin);
      return ncclBroadcast(place, place, static_cast<std::size_t>(chunk.end - chunk.begin), type, member, nccl, on);
    });
  });
  return {.sent = all_gather_bytes(data.count, size_of(data.type), g.members, g.member), .waited = {}, .moving = {}};
}

// NCCL has an all-to-all of its own from 2.28 on only, with the same sends and receives.
Transfer NcclCommunicator::all_to_all(StreamId stream, int group, Elements from, Elements to) {
  const GroupLink& g = group_link(group);
  const std::int64_t bytes = all_to_all_chunk(from, to, g.members);
  if (from.count == 0) return {};
  const std::int64_t chunk = from.count / g.members;
  backend_.copy(stream, at(to, g.member * chunk), at(from, g.member * chunk), Bytes(bytes));
  if (g.members == 1) return {};
  const cudaStream_t on = backend_.stream(stream);
  const ncclDataType_t type = nccl_type(from.type);
  const auto count = static_cast<std::size_t>(chunk);
  issue(*g.link, "all_to_all", [&](ncclComm_t nccl) {
    ncclResult_t result = ncclGroupStart();
    for (int step = 1; step < g.members && result == ncclSuccess; ++step) {
      const int next = (g.member + step) % g.members, previous = (g.member + g.members - step) % g.members;
      result = ncclSend(at(from, next * chunk), count, type, next, nccl, on);
      if (result == ncclSuccess) result = ncclRecv(at(to, previous * chunk), count, type, previous, nccl, on);
    }
    const ncclResult_t ended = ncclGroupEnd();
    return result == ncclSuccess ? ended : result;
  });
  return {.sent = all_to_all_bytes(from.count, size_of(from.type), g.members), .waited = {}, .moving = {}};
}

Transfer NcclCommunicator::broadcast(StreamId stream, int group, Elements data) {
  const GroupLink& g = group_link(group);
  if (g.members == 1 || data.count == 0) return {};
  issue(*g.link, "broadcast", [&](ncclComm_t nccl) {
    return ncclBroadcast(data.data, data.data, static_cast<std::size_t>(data.count), nccl_type(data.type), 0, nccl,
                         backend_.stream(stream));
  });
  return {.sent = broadcast_bytes(data.count, size_of(data.type), g.members, g.member), .waited = {}, .moving = {}};
}

// NCCL ignores where the others receive.
Transfer NcclCommunicator::reduce(StreamId stream, int group, Elements data) {
  const GroupLink& g = group_link(group);
  if (g.members == 1 || data.count == 0) return {};
  issue(*g.link, "reduce", [&](ncclComm_t nccl) {
    return ncclReduce(data.data, data.data, static_cast<std::size_t>(data.count), nccl_type(data.type), ncclSum, 0,
                      nccl, backend_.stream(stream));
  });
  return {.sent = to_first_bytes(data.count, size_of(data.type), g.member), .waited = {}, .moving = {}};
}

// NCCL has a gather and a scatter of its own from 2.28 on only, with the same sends and receives.
Transfer NcclCommunicator::gather(StreamId stream, int group, Elements own, Elements whole) {
  const GroupLink& g = group_link(group);
  check_parts(own, whole, g.members, g.member);
  if (own.count == 0) return {};
  if (g.member == 0) backend_.copy(stream, whole.data, own.data, Bytes(own.count * size_of(own.type)));
  if (g.members == 1) return {};
  const cudaStream_t on = backend_.stream(stream);
  const ncclDataType_t type = nccl_type(own.type);
  const auto count = static_cast<std::size_t>(own.count);
  issue(*g.link, "gather", [&](ncclComm_t nccl) {
    if (g.member > 0) return ncclSend(own.data, count, type, 0, nccl, on);
    ncclResult_t result = ncclGroupStart();
    for (int other = 1; other < g.members && result == ncclSuccess; ++other)
      result = ncclRecv(at(whole, other * own.count), count, type, other, nccl, on);
    const ncclResult_t ended = ncclGroupEnd();
    return result == ncclSuccess ? ended : result;
  });
  return {.sent = to_first_bytes(own.count, size_of(own.type), g.member), .waited = {}, .moving = {}};
}

Transfer NcclCommunicator::scatter(StreamId stream, int group, Elements whole, Elements own) {
  const GroupLink& g = group_link(group);
  check_parts(own, whole, g.members, g.member);
  if (own.count == 0) return {};
  if (g.member == 0) backend_.copy(stream, own.data, whole.data, Bytes(own.count * size_of(own.type)));
  if (g.members == 1) return {};
  const cudaStream_t on = backend_.stream(stream);
  const ncclDataType_t type = nccl_type(own.type);
  const auto count = static_cast<std::size_t>(own.count);
  issue(*g.link, "scatter", [&](ncclComm_t nccl) {
    if (g.member > 0) return ncclRecv(own.data, count, type, 0, nccl, on);
    ncclResult_t result = ncclGroupStart();
    for (int other = 1; other < g.members && result == ncclSuccess; ++other)
      result = ncclSend(at(whole, other * own.count), count, type, other, nccl, on);
    const ncclResult_t ended = ncclGroupEnd();
    return result == ncclSuccess ? ended : result;
  });
  return {.sent = broadcast_bytes(own.count, size_of(own.type), g.members, g.member), .waited = {}, .moving = {}};
}

SendTicket NcclCommunicator::send(StreamId stream, int destination, int channel, Elements data) {
  RouteLink& route = route_link({.source = rank_, .destination = destination, .channel = channel});
  const std::int64_t number = route.sends;
  const cudaEvent_t sent = route.sent[number % outstanding_sends];
  if (number >= outstanding_sends) parplan::check(cudaEventSynchronize(sent), "wait for an earlier send");
  const cudaStream_t on = backend_.stream(stream);
  if (data.count > 0)
    issue(*route.link, "send", [&](ncclComm_t nccl) {
      return ncclSend(data.data, static_cast<std::size_t>(data.count), nccl_type(data.type), 1, nccl, on);
    });
  parplan::check(cudaEventRecord(sent, on), "record an event");
  route.sends = number + 1;
  return {.destination = destination,
          .channel = channel,
          .number = number,
          .bytes = Bytes(data.count * size_of(data.type))};
}

Transfer NcclCommunicator::wait_sent(StreamId stream, SendTicket ticket) {
  check();
  const RouteLink& route = route_link({.source = rank_, .destination = ticket.destination, .channel = ticket.channel});
  // An event that was reused had been waited for.
  if (route.sends - ticket.number <= outstanding_sends)
    parplan::check(cudaStreamWaitEvent(backend_.stream(stream), route.sent[ticket.number % outstanding_sends], 0),
                   "wait for a send");
  return {.sent = ticket.bytes, .waited = {}, .moving = {}};
}

Transfer NcclCommunicator::receive(StreamId stream, int source, int channel, Elements data) {
  const RouteLink& route = route_link({.source = source, .destination = rank_, .channel = channel});
  if (data.count > 0)
    issue(*route.link, "receive", [&](ncclComm_t nccl) {
      return ncclRecv(data.data, static_cast<std::size_t>(data.count), nccl_type(data.type), 0, nccl,
                      backend_.stream(stream));
    });
  return {};
}

// Memory that cannot be registered is sent through NCCL's own buffers, as without registration.
void NcclCommunicator::register_memory(void* memory, Bytes bytes) {
  for (const std::unique_ptr<Link>& link : links_) {
    const std::lock_guard lock(link->calls);
    job_->throw_if_failed();
    void* handle = nullptr;
    if (ncclCommRegister(link->nccl, memory, static_cast<std::size_t>(bytes.count), &handle) == ncclSuccess &&
        handle != nullptr)
      link->registrations.push_back(handle);
  }
}

void NcclCommunicator::watch() {
  static_cast<void>(cudaSetDevice(backend_.device()));
  std::unique_lock lock(job_->mutex);
  while (!stopping_ && !job_->failed) {
    job_->changed.wait_for(lock, watch_interval, [&] { return stopping_ || job_->failed; });
    if (stopping_ || job_->failed) break;
    lock.unlock();
    for (const std::unique_ptr<Link>& link : links_) {
      ncclResult_t state = ncclSuccess;
      const ncclResult_t asked = ncclCommGetAsyncError(link->nccl, &state);
      const ncclResult_t wrong = asked == ncclSuccess ? state : asked;
      if (wrong != ncclSuccess && wrong != ncclInProgress)
        job_->fail(rank_, nccl_error_text(wrong, link->nccl, fmt::format("NCCL, {}", link->name)));
    }
    lock.lock();
  }
  const bool failed = job_->failed;
  lock.unlock();
  if (failed) abort_links();
}

void NcclCommunicator::abort_links() {
  for (const std::unique_ptr<Link>& link : links_) {
    std::unique_lock lock(link->calls, std::try_to_lock);
    const auto deadline = std::chrono::steady_clock::now() + call_patience;
    while (!lock.owns_lock() && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(1ms);
      static_cast<void>(lock.try_lock());
    }
    static_cast<void>(ncclCommAbort(link->nccl));
  }
  aborted_ = true;
}

// The end of the communicator: failures have nobody to tell.
void NcclCommunicator::release() {
  bool failed = false;
  {
    const std::lock_guard lock(job_->mutex);
    stopping_ = true;
    failed = job_->failed;
    job_->changed.notify_all();
  }
  if (watcher_.joinable()) watcher_.join();
  if (failed && !aborted_) abort_links();
  if (!aborted_)
    for (auto link = links_.rbegin(); link != links_.rend(); ++link) {
      for (void* registration : (*link)->registrations)
        static_cast<void>(ncclCommDeregister((*link)->nccl, registration));
      static_cast<void>(ncclCommDestroy((*link)->nccl));
    }
  links_.clear();
  for (RouteLink& route : routes_)
    for (const cudaEvent_t event : route.sent) static_cast<void>(cudaEventDestroy(event));
  routes_.clear();
  backend_.release(std::exchange(opening_, nullptr));
}

}  // namespace

// Versions are 10000 * major + 100 * minor + patch (nccl.h).
std::string nccl_version() {
  int version = 0;
  nccl_check(ncclGetVersion(&version), nullptr, "NCCL, asking for its version");
  return fmt::format("{}.{}.{}", version / 10000, version % 10000 / 100, version % 100);
}

std::vector<std::byte> make_nccl_id() {
  ncclUniqueId unique;
  nccl_check(ncclGetUniqueId(&unique), nullptr, "NCCL, making an id");
  std::vector<std::byte> id(sizeof(unique));
  std::memcpy(id.data(), &unique, sizeof(unique));
  return id;
}

std::unique_ptr<Communicator> make_nccl_communicator(const std::vector<std::byte>& id, int rank, int ranks,
                                                     const std::vector<CommunicationGroup>& groups,
                                                     const std::vector<SendRoute>& routes, CudaBackend& backend) {
  return std::make_unique<NcclCommunicator>(id, rank, ranks, groups, routes, backend);
}

}  // namespace parplan
