#include "tests/cuda_emulator/nccl.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/cuda_emulator/device.h"
#include "tests/cuda_emulator/memory.h"
#include "tests/cuda_emulator/scheduler.h"

namespace emulator {
namespace {

using Lock = std::unique_lock<std::mutex>;

// How long a call waits for the calls of other ranks.
constexpr auto patience = std::chrono::seconds(60);

enum class Kind { all_reduce, reduce, broadcast, reduce_scatter, all_gather, send, receive };
constexpr const char* kind_names[] = {"ncclAllReduce", "ncclReduce", "ncclBroadcast", "ncclReduceScatter",
                                      "ncclAllGather", "ncclSend",   "ncclRecv"};

struct TypeRow {
  ncclDataType_t type;
  const char* name;
  std::size_t bytes;
};
constexpr TypeRow type_rows[] = {
    {ncclInt8, "int8", 1},         {ncclUint8, "uint8", 1},     {ncclInt32, "int32", 4},
    {ncclUint32, "uint32", 4},     {ncclInt64, "int64", 8},     {ncclUint64, "uint64", 8},
    {ncclFloat16, "float16", 2},   {ncclFloat32, "float32", 4}, {ncclFloat64, "float64", 8},
    {ncclBfloat16, "bfloat16", 2},
};
const TypeRow* row_of(ncclDataType_t type) {
  for (const TypeRow& row : type_rows)
    if (row.type == type) return &row;
  return nullptr;
}
constexpr const char* operation_names[] = {"sum", "product", "maximum", "minimum", "average"};

// One call of one rank.
struct Operation {
  Kind kind{};
  int rank = 0;
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  std::size_t count = 0;
  ncclDataType_t type{};
  ncclRedOp_t reduction = ncclSum;
  int root = 0;  // of reduce and broadcast; the peer of send and receive

  std::int64_t number = 0;  // among the collectives of its rank, or among its sends to (receives from) its peer
  bool posted = false;      // its stream has reached it
  bool done = false;
};

std::string text_of(const Operation& o) {
  std::string text = "rank " + std::to_string(o.rank) + " calls " + kind_names[static_cast<std::size_t>(o.kind)] +
                     " of " + std::to_string(o.count) + " " + row_of(o.type)->name;
  if (o.kind == Kind::all_reduce || o.kind == Kind::reduce || o.kind == Kind::reduce_scatter)
    text += std::string(" (") + operation_names[o.reduction] + ")";
  if (o.kind == Kind::reduce || o.kind == Kind::broadcast) text += " with root " + std::to_string(o.root);
  if (o.kind == Kind::send || o.kind == Kind::receive) text += " with peer " + std::to_string(o.root);
  return text;
}

bool is_collective(Kind kind) { return kind != Kind::send && kind != Kind::receive; }

struct Member {
  bool present = false;
  bool aborted = false;
  int device = 0;
  std::int64_t issued = 0;    // groups of calls
  std::int64_t finished = 0;  // how many of them, in the order in which they were issued
  std::int64_t collectives = 0;
  std::map<int, std::int64_t> sends, receives;  // by peer
  // What it is waiting to connect for, before its calls return: the collectives of all, or a peer.
  bool wants_all = false;
  std::set<int> wants_peers;
};

// Where a split collects the ranks' arguments.
struct Split {
  int arrived = 0;
  std::vector<std::pair<int, int>> color_and_key;
  std::map<int, std::shared_ptr<struct World>> worlds;  // by color
  std::map<int, std::vector<int>> ranks;                // by color, in the new order
};

// The shared state of the ranks of one communicator, guarded by the scheduler's mutex.
struct World {
  int ranks = 0;
  std::vector<Member> members;
  int arrived = 0;
  std::map<std::int64_t, std::vector<std::shared_ptr<Operation>>> collectives;  // posted, by number and rank
  std::map<std::pair<std::pair<int, int>, std::int64_t>, std::shared_ptr<Operation>> sends;  // by (from, to) and number
  std::map<std::pair<std::pair<int, int>, std::int64_t>, std::shared_ptr<Operation>> receives;
  std::map<std::int64_t, std::shared_ptr<Split>> splits;
  std::vector<std::int64_t> splits_of;  // by rank
};

struct Process {
  std::condition_variable changed;
  std::map<std::string, std::weak_ptr<World>> worlds;  // by unique id
  std::int64_t ids = 0;
  std::atomic<int> waiting = 0;  // calls that wait for other ranks on the host
};
Process& process() {
  static auto* made = new Process;
  return *made;
}

thread_local std::string last_error;

ncclResult_t error(ncclResult_t result, const std::string& text) {
  last_error = text;
  return result;
}

[[noreturn]] void fail_with(const std::string& text) { fail(("NCCL: " + text).c_str()); }

}  // namespace
}  // namespace emulator

struct ncclComm {
  std::shared_ptr<emulator::World> world;
  int rank = 0;
  int device = 0;
  std::shared_ptr<emulator::Work> last;
  std::set<void*> registrations;
};

namespace emulator {
namespace {

std::set<ncclComm_t>& live() {
  static auto* made = new std::set<ncclComm_t>;
  return *made;
}

// Calls on a destroyed or aborted communicator are undefined.
void must_be_live(const Lock&, ncclComm_t communicator, const char* what) {
  if (!live().contains(communicator))
    fail_with(std::string(what) + " on a communicator that is not there, or no longer");
}

void wait_for_ranks(Lock& lock, const char* what, const std::function<bool()>& ready) {
  ++process().waiting;
  if (!process().changed.wait_for(lock, patience, ready))
    fail_with(std::string(what) + ": other ranks have not called it for 60 s");
  --process().waiting;
}

// The arguments in which ranks may not differ.
void must_match(const Operation& a, const Operation& b) {
  const bool pair = (a.kind == Kind::send && b.kind == Kind::receive);
  if ((pair || a.kind == b.kind) && a.count == b.count && a.type == b.type &&
      (pair || (a.reduction == b.reduction && a.root == b.root)))
    return;
  fail_with("calls that do not match: " + text_of(a) + ", " + text_of(b));
}

template <class T>
T combine(ncclRedOp_t operation, T a, T b) {
  switch (operation) {
    case ncclProd: return static_cast<T>(a * b);
    case ncclMax: return a < b ? b : a;
    case ncclMin: return b < a ? b : a;
    default: return static_cast<T>(a + b);
  }
}

// Numbers of 16 bits are rounded after every step, as in a ring.
template <class T>
void reduce_elements(const std::vector<const std::byte*>& inputs, std::byte* output, std::size_t count,
                     ncclRedOp_t operation) {
  const std::size_t ranks = inputs.size();
  constexpr bool is_integer = std::is_integral_v<T>;
  for (std::size_t i = 0; i < count; ++i) {
    // A ring: the chunk of rank c starts at the rank after c. NCCL promises no order.
    const std::size_t chunk = i * ranks / count;
    T result{};
    for (std::size_t step = 0; step < ranks; ++step) {
      T value;
      std::memcpy(static_cast<void*>(&value), inputs[(chunk + 1 + step) % ranks] + i * sizeof(T), sizeof(T));
      if constexpr (!is_integer) {
        if (operation == ncclAvg)
          value = static_cast<T>(static_cast<float>(value) * (1.0f / static_cast<float>(ranks)));
      }
      result = step == 0 ? value : combine(operation, result, value);
    }
    if constexpr (is_integer) {
      if (operation == ncclAvg) result = static_cast<T>(result / static_cast<T>(ranks));
    }
    std::memcpy(output + i * sizeof(T), static_cast<const void*>(&result), sizeof(T));
  }
}

void reduce(const std::vector<const std::byte*>& inputs, std::byte* output, std::size_t count, ncclDataType_t type,
            ncclRedOp_t operation) {
  switch (type) {
    case ncclInt8: return reduce_elements<signed char>(inputs, output, count, operation);
    case ncclUint8: return reduce_elements<unsigned char>(inputs, output, count, operation);
    case ncclInt32: return reduce_elements<int>(inputs, output, count, operation);
    case ncclUint32: return reduce_elements<unsigned>(inputs, output, count, operation);
    case ncclInt64: return reduce_elements<long long>(inputs, output, count, operation);
    case ncclUint64: return reduce_elements<unsigned long long>(inputs, output, count, operation);
    case ncclFloat16: return reduce_elements<__half>(inputs, output, count, operation);
    case ncclFloat32: return reduce_elements<float>(inputs, output, count, operation);
    case ncclFloat64: return reduce_elements<double>(inputs, output, count, operation);
    case ncclBfloat16: return reduce_elements<__nv_bfloat16>(inputs, output, count, operation);
  }
}

using Operations = std::vector<std::shared_ptr<Operation>>;

// Results go to separate memory first: in place is as good as elsewhere.
void run_collective(const Operations& all) {
  const Operation& first = *all.front();
  const std::size_t ranks = all.size();
  const std::size_t element = row_of(first.type)->bytes;
  std::vector<const std::byte*> inputs;
  for (const auto& operation : all) inputs.push_back(operation->from);
  switch (first.kind) {
    case Kind::all_reduce:
    case Kind::reduce: {
      std::vector<std::byte> result(first.count * element);
      reduce(inputs, result.data(), first.count, first.type, first.reduction);
      for (const auto& operation : all)
        if (first.kind == Kind::all_reduce || operation->rank == operation->root)
          std::memcpy(operation->to, result.data(), result.size());
      break;
    }
    case Kind::reduce_scatter: {
      std::vector<std::byte> result(ranks * first.count * element);
      reduce(inputs, result.data(), ranks * first.count, first.type, first.reduction);
      for (const auto& operation : all)
        std::memcpy(operation->to, result.data() + static_cast<std::size_t>(operation->rank) * first.count * element,
                    first.count * element);
      break;
    }
    case Kind::all_gather: {
      std::vector<std::byte> result(ranks * first.count * element);
      for (std::size_t rank = 0; rank < ranks; ++rank)
        std::memcpy(result.data() + rank * first.count * element, inputs[rank], first.count * element);
      for (const auto& operation : all) std::memcpy(operation->to, result.data(), result.size());
      break;
    }
    case Kind::broadcast: {
      const std::byte* root = inputs[static_cast<std::size_t>(first.root)];
      const std::vector<std::byte> result(root, root + first.count * element);
      for (const auto& operation : all) std::memcpy(operation->to, result.data(), result.size());
      break;
    }
    case Kind::send:
    case Kind::receive: break;
  }
}

// The calls between ncclGroupStart and ncclGroupEnd on one communicator, or one call. It is
// finished when all of its calls are; they run concurrently. Groups of one communicator and rank
// run in the order in which they were issued, whatever their streams.
class GroupWork final : public Work {
 public:
  GroupWork(std::shared_ptr<World> world, int rank, const std::vector<Operation>& operations)
      : world_(std::move(world)), rank_(rank) {
    Member& m = member();
    ticket_ = m.issued++;
    for (const Operation& operation : operations) {
      auto& copied = operations_.emplace_back(std::make_shared<Operation>(operation));
      if (is_collective(operation.kind)) copied->number = m.collectives++;
      if (operation.kind == Kind::send) copied->number = m.sends[operation.root]++;
      if (operation.kind == Kind::receive) copied->number = m.receives[operation.root]++;
    }
  }

  std::string text() const override {
    std::string text = "NCCL, communicator of " + std::to_string(world_->ranks) + " ranks:";
    for (const auto& operation : operations_)
      if (!operation->done)
        text += " " + text_of(*operation) + (operation->posted ? "" : ", which earlier calls hold up");
    return text;
  }

  bool ready() override {
    if (member().aborted || all_done()) return true;
    if (member().finished != ticket_) return false;
    post();
    return find_match().has_value();
  }
  void start() override { match_ = member().aborted ? std::nullopt : find_match(); }
  void run() override {
    if (!match_.has_value()) return;
    if (is_collective(match_->front()->kind)) {
      run_collective(*match_);
    } else {
      const Operation& send = *match_->front();
      std::memmove(match_->back()->to, send.from, send.count * row_of(send.type)->bytes);
    }
  }
  bool finish() override {
    if (match_.has_value())
      for (const auto& operation : *match_) operation->done = true;
    match_.reset();
    if (!member().aborted && !all_done()) return false;
    member().finished = std::max(member().finished, ticket_ + 1);
    forget();
    return true;
  }

 private:
  Member& member() const { return world_->members[static_cast<std::size_t>(rank_)]; }
  bool all_done() const {
    return std::all_of(operations_.begin(), operations_.end(), [](const auto& operation) { return operation->done; });
  }
  static std::pair<std::pair<int, int>, std::int64_t> key_of(const Operation& o) {
    return {o.kind == Kind::send ? std::pair(o.rank, o.root) : std::pair(o.root, o.rank), o.number};
  }

  void post() {
    for (const auto& operation : operations_) {
      if (operation->posted) continue;
      operation->posted = true;
      if (operation->kind == Kind::send) {
        world_->sends[key_of(*operation)] = operation;
      } else if (operation->kind == Kind::receive) {
        world_->receives[key_of(*operation)] = operation;
      } else {
        auto& all = world_->collectives[operation->number];
        all.resize(static_cast<std::size_t>(world_->ranks));
        all[static_cast<std::size_t>(rank_)] = operation;
      }
    }
  }

  // The calls of one of this group's operations, when all that it needs have been posted.
  std::optional<Operations> find_match() const {
    for (const auto& operation : operations_) {
      if (operation->done || !operation->posted) continue;
      if (is_collective(operation->kind)) {
        const Operations& all = world_->collectives[operation->number];
        for (const auto& other : all)
          if (other != nullptr) must_match(*operation, *other);
        if (std::find(all.begin(), all.end(), nullptr) == all.end()) return all;
      } else {
        const auto key = key_of(*operation);
        const auto send = world_->sends.find(key), receive = world_->receives.find(key);
        if (send == world_->sends.end() || receive == world_->receives.end()) continue;
        must_match(*send->second, *receive->second);
        return Operations{send->second, receive->second};
      }
    }
    return std::nullopt;
  }

  void forget() {
    for (const auto& operation : operations_) {
      if (operation->kind == Kind::send) {
        world_->sends.erase(key_of(*operation));
      } else if (operation->kind == Kind::receive) {
        world_->receives.erase(key_of(*operation));
      } else {
        const auto place = world_->collectives.find(operation->number);
        if (place == world_->collectives.end()) continue;
        if (!operation->done && operation->posted) place->second[static_cast<std::size_t>(rank_)] = nullptr;  // aborted
        const bool over = std::all_of(place->second.begin(), place->second.end(),
                                      [](const auto& other) { return other == nullptr || other->done; });
        if (over) world_->collectives.erase(place);
      }
    }
  }

  std::shared_ptr<World> world_;
  int rank_;
  std::int64_t ticket_ = 0;
  Operations operations_;
  std::optional<Operations> match_;
};

struct Call {
  ncclComm_t communicator;
  cudaStream_t stream;
  Operation operation;
};
thread_local int group_depth = 0;
thread_local std::vector<Call> group_calls;

// Ranks are connected when they first use a connection, in the call itself: it returns when the
// others have called, too (transport/p2p and runtimeConn of NCCL 2.22 and later).
ncclResult_t connect(Lock& lock, const std::shared_ptr<World>& world, int rank,
                     const std::vector<Operation>& operations) {
  Member& m = world->members[static_cast<std::size_t>(rank)];
  for (const Operation& operation : operations) {
    if (is_collective(operation.kind)) m.wants_all = true;
    if (!is_collective(operation.kind)) m.wants_peers.insert(operation.root);
  }
  process().changed.notify_all();
  const auto connected = [&] {
    for (const Operation& operation : operations) {
      if (is_collective(operation.kind)) {
        for (const Member& other : world->members)
          if (!other.wants_all) return false;
      } else if (!world->members[static_cast<std::size_t>(operation.root)].wants_peers.contains(rank)) {
        return false;
      }
    }
    return true;
  };
  wait_for_ranks(lock, kind_names[static_cast<std::size_t>(operations.front().kind)],
                 [&] { return m.aborted || connected(); });
  return m.aborted ? error(ncclInternalError, "the communicator was aborted") : ncclSuccess;
}

ncclResult_t issue(ncclComm_t communicator, cudaStream_t stream, const std::vector<Operation>& operations) {
  std::shared_ptr<World> world;
  int rank = 0;
  {
    Lock lock(scheduler_mutex());
    must_be_live(lock, communicator, kind_names[static_cast<std::size_t>(operations.front().kind)]);
    world = communicator->world;
    rank = communicator->rank;
    if (const ncclResult_t result = connect(lock, world, rank, operations); result != ncclSuccess) return result;
  }
  std::shared_ptr<Work> submitted;
  const cudaError_t submit_error = submit(
      stream, [=] { return std::make_shared<GroupWork>(world, rank, operations); }, &submitted);
  if (submit_error != cudaSuccess) return error(ncclUnhandledCudaError, cudaGetErrorString(submit_error));
  const Lock lock(scheduler_mutex());
  if (live().contains(communicator) && submitted != nullptr) communicator->last = submitted;
  return ncclSuccess;
}

ncclResult_t end_group() {
  std::vector<Call> calls = std::exchange(group_calls, {});
  // By communicator, in the order of the first calls.
  std::vector<ncclComm_t> order;
  for (const Call& call : calls)
    if (std::find(order.begin(), order.end(), call.communicator) == order.end()) order.push_back(call.communicator);
  for (ncclComm_t communicator : order) {
    std::vector<Operation> operations;
    cudaStream_t stream = nullptr;
    for (const Call& call : calls) {
      if (call.communicator != communicator) continue;
      if (!operations.empty() && call.stream != stream)
        fail_with("calls of one group and communicator on several streams are not emulated");
      stream = call.stream;
      operations.push_back(call.operation);
    }
    if (const ncclResult_t result = issue(communicator, stream, operations); result != ncclSuccess) return result;
  }
  return ncclSuccess;
}

void must_be_device_memory(const char* what, const void* begin, std::size_t bytes) {
  const std::optional<Allocation> found = allocation_at(begin);
  if (!found.has_value() || found->type != cudaMemoryTypeDevice || !lies_in(*found, begin, bytes))
    fail_with(std::string(what) + ": " + std::to_string(bytes) + " bytes lie in no allocation of device memory");
}

// `from_bytes` are read and `to_bytes` written; where they overlap they must be in place as
// documented.
ncclResult_t call(Kind kind, ncclComm_t communicator, cudaStream_t stream, Operation operation,
                  std::size_t read_elements, std::size_t written_elements) {
  const char* name = kind_names[static_cast<std::size_t>(kind)];
  {
    const Lock lock(scheduler_mutex());
    must_be_live(lock, communicator, name);
  }
  const TypeRow* type = row_of(operation.type);
  if (type == nullptr) return error(ncclInvalidArgument, std::string(name) + ": no such type");
  if (operation.reduction < ncclSum || operation.reduction >= ncclNumOps)
    return error(ncclInvalidArgument, std::string(name) + ": no such operation");
  if (operation.root < 0 || operation.root >= communicator->world->ranks)
    return error(ncclInvalidArgument, std::string(name) + ": rank " + std::to_string(operation.root) + " of " +
                                          std::to_string(communicator->world->ranks));
  if (operation.count == 0) return ncclSuccess;
  if (device_of(stream) != communicator->device) fail_with(std::string(name) + " on a stream of another device");
  operation.kind = kind;
  operation.rank = communicator->rank;
  const std::size_t read_bytes = read_elements * type->bytes, written_bytes = written_elements * type->bytes;
  if (read_bytes > 0) must_be_device_memory(name, operation.from, read_bytes);
  if (written_bytes > 0) must_be_device_memory(name, operation.to, written_bytes);
  if (read_bytes > 0 && written_bytes > 0 && operation.from < operation.to + written_bytes &&
      operation.to < operation.from + read_bytes) {
    const std::size_t offset = static_cast<std::size_t>(operation.rank) * operation.count * type->bytes;
    const std::byte* in_place = kind == Kind::all_gather       ? operation.to + offset
                                : kind == Kind::reduce_scatter ? operation.to - offset
                                                               : operation.to;
    if (operation.from != in_place) fail_with(std::string(name) + ": buffers overlap, but not in place");
  }
  if (group_depth > 0) {
    group_calls.push_back({communicator, stream, operation});
    return ncclSuccess;
  }
  return issue(communicator, stream, {operation});
}

ncclComm_t make_communicator(std::shared_ptr<World> world, int rank) {
  auto* made = new ncclComm;
  made->world = std::move(world);
  made->rank = rank;
  made->device = current_device();
  live().insert(made);
  return made;
}

std::shared_ptr<World> make_world(int ranks) {
  auto world = std::make_shared<World>();
  world->ranks = ranks;
  world->members.resize(static_cast<std::size_t>(ranks));
  world->splits_of.resize(static_cast<std::size_t>(ranks));
  return world;
}

ncclResult_t check_config(const ncclConfig_t* config) {
  if (config == nullptr) return ncclSuccess;
  if (config->size != sizeof(ncclConfig_t) || config->magic != 0xcafebeef)
    return error(ncclInvalidArgument, "a configuration that was not made by NCCL_CONFIG_INITIALIZER");
  if (config->blocking == 0) fail_with("communicators that do not block are not emulated");
  return ncclSuccess;
}

ncclResult_t init_rank(ncclComm_t* made, int ranks, const ncclUniqueId& id, int rank, const ncclConfig_t* config) {
  if (made == nullptr || ranks < 1 || rank < 0 || rank >= ranks)
    return error(ncclInvalidArgument, "ncclCommInitRank: no such rank");
  if (const ncclResult_t result = check_config(config); result != ncclSuccess) return result;
  if (group_depth > 0) fail_with("ncclCommInitRank in a group of calls is not emulated");
  const std::string key(id.internal, sizeof(id.internal));
  if (key.find("parplan emulated " + std::to_string(getpid()) + " ") != 0)
    return error(ncclSystemError, "the id is of another process: ranks of the emulated NCCL are threads of one");
  Lock lock(scheduler_mutex());
  std::shared_ptr<World> world = process().worlds[key].lock();
  if (world == nullptr) process().worlds[key] = world = make_world(ranks);
  if (world->ranks != ranks)
    fail_with("ncclCommInitRank of " + std::to_string(ranks) + " ranks and of " + std::to_string(world->ranks) +
              " with one id");
  Member& member = world->members[static_cast<std::size_t>(rank)];
  if (member.present) fail_with("ncclCommInitRank: rank " + std::to_string(rank) + " twice");
  member.present = true;
  member.device = current_device();
  ++world->arrived;
  process().changed.notify_all();
  wait_for_ranks(lock, "ncclCommInitRank", [&] { return world->arrived == ranks; });
  if (devices() > 1)
    for (int other = 0; other < ranks; ++other)
      if (other != rank && world->members[static_cast<std::size_t>(other)].device == member.device)
        return error(ncclInvalidUsage, "Duplicate GPU detected : rank " + std::to_string(rank) + " and rank " +
                                           std::to_string(other) + " both on CUDA device " +
                                           std::to_string(member.device));
  *made = make_communicator(world, rank);
  return ncclSuccess;
}

ncclResult_t split(ncclComm_t communicator, int color, int key, ncclComm_t* made, const ncclConfig_t* config) {
  if (made == nullptr || (color < 0 && color != NCCL_SPLIT_NOCOLOR))
    return error(ncclInvalidArgument, "ncclCommSplit: no such color");
  if (const ncclResult_t result = check_config(config); result != ncclSuccess) return result;
  Lock lock(scheduler_mutex());
  must_be_live(lock, communicator, "ncclCommSplit");
  if (communicator->last != nullptr && !communicator->last->done)
    fail_with("ncclCommSplit while the communicator has work that is not done");
  const std::shared_ptr<World> parent = communicator->world;
  const int rank = communicator->rank;
  std::shared_ptr<Split>& place = parent->splits[parent->splits_of[static_cast<std::size_t>(rank)]++];
  if (place == nullptr) {
    place = std::make_shared<Split>();
    place->color_and_key.resize(static_cast<std::size_t>(parent->ranks));
  }
  const std::shared_ptr<Split> split = place;
  split->color_and_key[static_cast<std::size_t>(rank)] = {color, key};
  if (++split->arrived == parent->ranks) {
    for (int other = 0; other < parent->ranks; ++other)
      if (const int its = split->color_and_key[static_cast<std::size_t>(other)].first; its >= 0)
        split->ranks[its].push_back(other);
    for (auto& [its, members] : split->ranks) {
      std::stable_sort(members.begin(), members.end(), [&](int a, int b) {
        return split->color_and_key[static_cast<std::size_t>(a)].second <
               split->color_and_key[static_cast<std::size_t>(b)].second;
      });
      split->worlds[its] = make_world(static_cast<int>(members.size()));
    }
    process().changed.notify_all();
  }
  Member& member = parent->members[static_cast<std::size_t>(rank)];
  wait_for_ranks(lock, "ncclCommSplit", [&] { return member.aborted || split->arrived == parent->ranks; });
  *made = NCCL_COMM_NULL;
  if (member.aborted) return error(ncclInternalError, "the communicator was aborted");
  if (color < 0) return ncclSuccess;
  const std::vector<int>& members = split->ranks[color];
  *made = make_communicator(split->worlds[color],
                            static_cast<int>(std::find(members.begin(), members.end(), rank) - members.begin()));
  return ncclSuccess;
}

// Returns when the rank's work is done.
ncclResult_t finalize(ncclComm_t communicator, const char* what) {
  std::shared_ptr<Work> last;
  {
    const Lock lock(scheduler_mutex());
    must_be_live(lock, communicator, what);
    last = communicator->last;
  }
  if (last != nullptr) wait_for(last);
  return ncclSuccess;
}

ncclResult_t destroy(ncclComm_t communicator) {
  if (communicator == nullptr) return ncclSuccess;
  if (const ncclResult_t result = finalize(communicator, "ncclCommDestroy"); result != ncclSuccess) return result;
  const Lock lock(scheduler_mutex());
  live().erase(communicator);
  delete communicator;
  return ncclSuccess;
}

// The rank's submitted work ends unfinished.
ncclResult_t abort(ncclComm_t communicator) {
  if (communicator == nullptr) return ncclSuccess;
  const Lock lock(scheduler_mutex());
  must_be_live(lock, communicator, "ncclCommAbort");
  communicator->world->members[static_cast<std::size_t>(communicator->rank)].aborted = true;
  live().erase(communicator);
  delete communicator;
  process().changed.notify_all();
  notify_scheduler();
  return ncclSuccess;
}

template <class T>
const std::byte* bytes(const T* pointer) {
  return static_cast<const std::byte*>(static_cast<const void*>(pointer));
}
std::byte* bytes(void* pointer) { return static_cast<std::byte*>(pointer); }

struct ResultRow {
  ncclResult_t result;
  const char* text;
};
constexpr ResultRow result_rows[] = {
    {ncclSuccess, "no error"},
    {ncclUnhandledCudaError, "unhandled cuda error (run with NCCL_DEBUG=INFO for details)"},
    {ncclSystemError, "unhandled system error (run with NCCL_DEBUG=INFO for details)"},
    {ncclInternalError, "internal error - please report this issue to the NCCL developers"},
    {ncclInvalidArgument, "invalid argument (run with NCCL_DEBUG=WARN for details)"},
    {ncclInvalidUsage, "invalid usage (run with NCCL_DEBUG=WARN for details)"},
    {ncclRemoteError, "remote process exited or there was a network error"},
    {ncclInProgress, "NCCL operation in progress"},
};

}  // namespace
int ranks_that_wait() { return process().waiting; }

}  // namespace emulator

using namespace emulator;

ncclResult_t ncclGetVersion(int* version) {
  if (version == nullptr) return ncclInvalidArgument;
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  if (id == nullptr) return ncclInvalidArgument;
  const Lock lock(scheduler_mutex());
  *id = {};
  const std::string text = "parplan emulated " + std::to_string(getpid()) + " " + std::to_string(process().ids++);
  std::memcpy(id->internal, text.c_str(), text.size());
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  for (const ResultRow& row : result_rows)
    if (row.result == result) return row.text;
  return "unknown result code";
}
const char* ncclGetLastError(ncclComm_t) { return last_error.c_str(); }

ncclResult_t ncclMemAlloc(void** memory, std::size_t bytes) {
  return cudaMalloc(memory, bytes) == cudaSuccess ? ncclSuccess : error(ncclUnhandledCudaError, "ncclMemAlloc");
}
ncclResult_t ncclMemFree(void* memory) {
  return cudaFree(memory) == cudaSuccess ? ncclSuccess : error(ncclUnhandledCudaError, "ncclMemFree");
}

ncclResult_t ncclCommInitRank(ncclComm_t* communicator, int ranks, ncclUniqueId id, int rank) {
  return init_rank(communicator, ranks, id, rank, nullptr);
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* communicator, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  return init_rank(communicator, ranks, id, rank, config);
}
ncclResult_t ncclCommSplit(ncclComm_t communicator, int color, int key, ncclComm_t* made, ncclConfig_t* config) {
  return split(communicator, color, key, made, config);
}
ncclResult_t ncclCommFinalize(ncclComm_t communicator) { return finalize(communicator, "ncclCommFinalize"); }
ncclResult_t ncclCommDestroy(ncclComm_t communicator) { return destroy(communicator); }
ncclResult_t ncclCommAbort(ncclComm_t communicator) { return abort(communicator); }

ncclResult_t ncclCommGetAsyncError(ncclComm_t communicator, ncclResult_t* found) {
  const Lock lock(scheduler_mutex());
  must_be_live(lock, communicator, "ncclCommGetAsyncError");
  if (found == nullptr) return ncclInvalidArgument;
  *found = ncclSuccess;
  return ncclSuccess;
}
ncclResult_t ncclCommCount(ncclComm_t communicator, int* count) {
  const Lock lock(scheduler_mutex());
  must_be_live(lock, communicator, "ncclCommCount");
  *count = communicator->world->ranks;
  return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(ncclComm_t communicator, int* device) {
  const Lock lock(scheduler_mutex());
  must_be_live(lock, communicator, "ncclCommCuDevice");
  *device = communicator->device;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(ncclComm_t communicator, int* rank) {
  const Lock lock(scheduler_mutex());
  must_be_live(lock, communicator, "ncclCommUserRank");
  *rank = communicator->rank;
  return ncclSuccess;
}

ncclResult_t ncclCommRegister(ncclComm_t communicator, void* memory, std::size_t bytes, void** handle) {
  const Lock lock(scheduler_mutex());
  must_be_live(lock, communicator, "ncclCommRegister");
  if (memory == nullptr || handle == nullptr || bytes == 0)
    return error(ncclInvalidArgument, "ncclCommRegister: nothing to register");
  must_be_device_memory("ncclCommRegister", memory, bytes);
  *handle = ::operator new(1);
  communicator->registrations.insert(*handle);
  return ncclSuccess;
}
ncclResult_t ncclCommDeregister(ncclComm_t communicator, void* handle) {
  const Lock lock(scheduler_mutex());
  must_be_live(lock, communicator, "ncclCommDeregister");
  if (communicator->registrations.erase(handle) == 0)
    return error(ncclInvalidArgument, "ncclCommDeregister: no such registration");
  ::operator delete(handle);
  return ncclSuccess;
}

ncclResult_t ncclReduce(const void* from, void* to, std::size_t count, ncclDataType_t type, ncclRedOp_t operation,
                        int root, ncclComm_t communicator, cudaStream_t stream) {
  const bool writes = communicator != nullptr && communicator->rank == root;
  return call(
      Kind::reduce, communicator, stream,
      {.from = bytes(from), .to = bytes(to), .count = count, .type = type, .reduction = operation, .root = root}, count,
      writes ? count : 0);
}
ncclResult_t ncclBroadcast(const void* from, void* to, std::size_t count, ncclDataType_t type, int root,
                           ncclComm_t communicator, cudaStream_t stream) {
  const bool reads = communicator != nullptr && communicator->rank == root;
  return call(Kind::broadcast, communicator, stream,
              {.from = bytes(from), .to = bytes(to), .count = count, .type = type, .root = root}, reads ? count : 0,
              count);
}
ncclResult_t ncclAllReduce(const void* from, void* to, std::size_t count, ncclDataType_t type, ncclRedOp_t operation,
                           ncclComm_t communicator, cudaStream_t stream) {
  return call(Kind::all_reduce, communicator, stream,
              {.from = bytes(from), .to = bytes(to), .count = count, .type = type, .reduction = operation}, count,
              count);
}
ncclResult_t ncclReduceScatter(const void* from, void* to, std::size_t received_count, ncclDataType_t type,
                               ncclRedOp_t operation, ncclComm_t communicator, cudaStream_t stream) {
  const std::size_t ranks = communicator == nullptr ? 1 : static_cast<std::size_t>(communicator->world->ranks);
  return call(Kind::reduce_scatter, communicator, stream,
              {.from = bytes(from), .to = bytes(to), .count = received_count, .type = type, .reduction = operation},
              ranks * received_count, received_count);
}
ncclResult_t ncclAllGather(const void* from, void* to, std::size_t sent_count, ncclDataType_t type,
                           ncclComm_t communicator, cudaStream_t stream) {
  const std::size_t ranks = communicator == nullptr ? 1 : static_cast<std::size_t>(communicator->world->ranks);
  return call(Kind::all_gather, communicator, stream,
              {.from = bytes(from), .to = bytes(to), .count = sent_count, .type = type}, sent_count,
              ranks * sent_count);
}
ncclResult_t ncclSend(const void* from, std::size_t count, ncclDataType_t type, int peer, ncclComm_t communicator,
                      cudaStream_t stream) {
  return call(Kind::send, communicator, stream, {.from = bytes(from), .count = count, .type = type, .root = peer},
              count, 0);
}
ncclResult_t ncclRecv(void* to, std::size_t count, ncclDataType_t type, int peer, ncclComm_t communicator,
                      cudaStream_t stream) {
  return call(Kind::receive, communicator, stream, {.to = bytes(to), .count = count, .type = type, .root = peer}, 0,
              count);
}

ncclResult_t ncclGroupStart() {
  ++group_depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (group_depth == 0) return error(ncclInvalidUsage, "ncclGroupEnd: not in a group call.");
  if (--group_depth > 0) return ncclSuccess;
  return group_calls.empty() ? ncclSuccess : end_group();
}
