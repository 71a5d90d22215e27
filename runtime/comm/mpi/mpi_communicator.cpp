#include "runtime/comm/mpi/mpi_communicator.h"

#include <mpi.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <climits>
#include <cstddef>
#include <cstring>
#include <deque>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "runtime/comm/collective_call.h"
#include "runtime/comm/mpi/mpi_check.h"

namespace parplan {
namespace {

using Clock = std::chrono::steady_clock;

// Up to this size an all-reduce is one message to every other member, sent together with the
// announcement.
constexpr std::int64_t small_count = 1024;
constexpr std::size_t most_outstanding_sends = 64;
// Elements per message of a reduction: enough that messages are few, and few enough that received
// data is added from the cache.
constexpr std::int64_t most_piece_elements = 64 * 1024;
constexpr std::int64_t least_piece_elements = 4 * 1024;
constexpr std::int64_t scratch_elements = 1024 * 1024;
// MPI counts in int.
constexpr std::int64_t most_message_elements = std::int64_t{1} << 28;

// Tags of a group's communicator.
constexpr int call_tag = 0;
constexpr int reduce_tag = 1;
constexpr int gather_tag = 2;
constexpr int exchange_tag = 3;
constexpr int first_tag = 4;  // from or to the first member

// The announcement of a collective: its first message to every other member.
struct Call {
  CollectiveCall head;
  std::array<float, small_count> data;  // of a small all-reduce; otherwise not sent
};
constexpr std::size_t call_head_bytes = offsetof(Call, data);

class MpiCommunicator final : public Communicator {
 public:
  MpiCommunicator(std::shared_ptr<MpiProcess> process, const MpiHost& host,
                  const std::vector<CommunicationGroup>& groups, int channels);
  ~MpiCommunicator() override;

  int rank() const override { return process_->process(); }
  int ranks() const override { return process_->processes(); }
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
  void check() override { process_->check(); }
  void abort(const std::string& reason) override {
    process_->fail(fmt::format("rank {} stopped: {}", rank(), reason));
  }

 private:
  struct Group {
    int id = 0;
    std::vector<int> ranks;
    int member = 0;
    MPI_Comm comm = MPI_COMM_NULL;  // rank i of it is member i
    Call own_call;
    std::vector<Call> calls;                // by member
    std::vector<MPI_Request> call_receipts;
    std::vector<MPI_Request> call_sends;
    int members() const { return static_cast<int>(ranks.size()); }
  };
  // Sends to one destination on one channel, oldest first.
  struct Line {
    std::deque<MPI_Request> outstanding;
    std::int64_t first = 0;  // number of the oldest outstanding one
  };

  // Makes the communicators of this rank's groups, whose numbers in the job's list are given.
  void connect(const std::vector<std::size_t>& numbers);
  Group& group_of(int id);
  Line& line_of(int destination, int channel);
  void wait_for(std::vector<MPI_Request>& requests, const std::vector<int>& concerned);
  // Cancels what can be cancelled of unfinished requests.
  void give_up(std::vector<MPI_Request>& requests);
  void give_up_all(Group& group);
  void retire_sends(Line& line);

  void announce(Group& group, Collective collective, std::int64_t count, const float* small_data);
  // Waits for every other member's announcement.
  Clock::time_point meet(Group& group);
  void reduce_chunks(Group& group, InOrder adder, float* data, std::int64_t count, Clock::time_point& met);
  void reduce_on_first(Group& group, float* data, std::int64_t count, Clock::time_point& met);
  // Between the first member and every other one: `stride` elements apart on the first.
  Transfer with_first(Collective collective, int id, bool first_sends, float* data, std::int64_t count,
                      std::int64_t stride, Bytes sent);
  void post_gather(Group& group, float* data, std::int64_t count);
  void post_exchange(Group& group, float* from, float* to, std::int64_t chunk);
  void post(Group& group, bool is_send, float* data, std::int64_t count, int member, int tag,
            std::vector<MPI_Request>& requests);

  std::shared_ptr<MpiProcess> process_;
  MpiHost host_;
  int channels_;
  MPI_Comm point_to_point_ = MPI_COMM_NULL;
  std::vector<Group> groups_;
  std::vector<Line> lines_;
  std::vector<float> scratch_;
  std::array<std::vector<MPI_Request>, 2> requests_;
  std::vector<const float*> inputs_;
};

MpiCommunicator::MpiCommunicator(std::shared_ptr<MpiProcess> process, const MpiHost& host,
                                 const std::vector<CommunicationGroup>& groups, int channels)
    : process_(std::move(process)), host_(host), channels_(channels) {
  PARPLAN_ASSERT(channels >= 0, fmt::format("{} channels", channels));
  std::size_t most_members = 1;
  std::vector<std::size_t> numbers;  // in the list, of this rank's groups
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const std::vector<int>& members = groups[g].ranks;
    PARPLAN_ASSERT(!members.empty() && members.front() >= 0 && members.back() < ranks() &&
                       std::adjacent_find(members.begin(), members.end(), std::greater_equal<>()) == members.end(),
                   fmt::format("group {} of {} ranks, {} in all", groups[g].id, members.size(), ranks()));
    for (std::size_t earlier = 0; earlier < g; ++earlier)
      PARPLAN_ASSERT(groups[earlier].id != groups[g].id, fmt::format("two groups have id {}", groups[g].id));
    const auto own = std::find(members.begin(), members.end(), rank());
    if (own == members.end()) continue;
    numbers.push_back(g);
    Group& group = groups_.emplace_back();
    group.id = groups[g].id;
    group.ranks = members;
    group.member = static_cast<int>(own - members.begin());
    most_members = std::max(most_members, members.size());
    if (members.size() == 1) continue;
    group.calls.resize(members.size());
    group.call_receipts.reserve(members.size());
    group.call_sends.reserve(members.size());
  }
  lines_.resize(static_cast<std::size_t>(ranks()) * static_cast<std::size_t>(channels));
  inputs_.resize(most_members);
  const auto piece = std::clamp<std::int64_t>(scratch_elements / static_cast<std::int64_t>(most_members),
                                              least_piece_elements, most_piece_elements);
  if (most_members > 1) scratch_.resize(2 * most_members * static_cast<std::size_t>(piece));

  // Making communicators waits inside MPI for all members, whom nothing can wake there: it begins
  // when everybody has what it needs.
  process_->all_gather({});
  connect(numbers);
}

void MpiCommunicator::connect(const std::vector<std::size_t>& numbers) {
  MPI_Group world = MPI_GROUP_NULL;
  {
    const std::lock_guard lock(process_->calls());
    PARPLAN_MPI(MPI_Comm_dup(MPI_COMM_WORLD, &point_to_point_));
    PARPLAN_MPI(MPI_Comm_group(point_to_point_, &world));
  }
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    Group& group = groups_[i];
    if (group.members() == 1) continue;
    // Every member makes its groups in the order of the list, so that nobody waits in a cycle. Tags
    // up to 32767 are allowed everywhere.
    const std::lock_guard lock(process_->calls());
    MPI_Group selected = MPI_GROUP_NULL;
    PARPLAN_MPI(MPI_Group_incl(world, group.members(), group.ranks.data(), &selected));
    PARPLAN_MPI(MPI_Comm_create_group(point_to_point_, selected, static_cast<int>(numbers[i] % 32768), &group.comm));
    PARPLAN_MPI(MPI_Group_free(&selected));
  }
  const std::lock_guard lock(process_->calls());
  PARPLAN_MPI(MPI_Group_free(&world));
}

// After a failure, sends that nobody has received must not continue: their data is about to be
// freed.
MpiCommunicator::~MpiCommunicator() {
  std::vector<MPI_Request> unsent;
  for (const Line& line : lines_) unsent.insert(unsent.end(), line.outstanding.begin(), line.outstanding.end());
  give_up(unsent);
  try {
    process_->check();
    const std::lock_guard lock(process_->calls());
    for (Group& group : groups_)
      if (group.comm != MPI_COMM_NULL) PARPLAN_MPI(MPI_Comm_free(&group.comm));
    PARPLAN_MPI(MPI_Comm_free(&point_to_point_));
  } catch (const RunError&) {
    // The job has failed; the rest ends with the process.
  }
}

MpiCommunicator::Group& MpiCommunicator::group_of(int id) {
  for (Group& group : groups_)
    if (group.id == id) return group;
  throw InternalError(fmt::format("rank {} is no member of group {}", rank(), id));
}

MpiCommunicator::Line& MpiCommunicator::line_of(int destination, int channel) {
  PARPLAN_ASSERT(destination >= 0 && destination < ranks() && channel >= 0 && channel < channels_,
                 fmt::format("between rank {} and rank {} on channel {}: {} ranks, {} channels", rank(), destination,
                             channel, ranks(), channels_));
  return lines_[static_cast<std::size_t>(destination) * static_cast<std::size_t>(channels_) +
                static_cast<std::size_t>(channel)];
}

void MpiCommunicator::wait_for(std::vector<MPI_Request>& requests, const std::vector<int>& concerned) {
  process_->wait_until(
      [&] {
        int done = 0;
        PARPLAN_MPI(MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done, MPI_STATUSES_IGNORE));
        return done != 0;
      },
      concerned);
  requests.clear();
}

// Receives that matched no message yet are cancelled. Anything else that is unfinished may continue
// at MPI's next call, in memory that is about to be freed: there must be none.
void MpiCommunicator::give_up(std::vector<MPI_Request>& requests) {
  bool all_done = true;
  try {
    const std::lock_guard lock(process_->calls());
    for (MPI_Request& request : requests) {
      int done = 0;
      PARPLAN_MPI(MPI_Test(&request, &done, MPI_STATUS_IGNORE));
      if (done) continue;
      PARPLAN_MPI(MPI_Cancel(&request));
      PARPLAN_MPI(MPI_Test(&request, &done, MPI_STATUS_IGNORE));
      all_done = all_done && done;
    }
  } catch (const RunError&) {
    all_done = false;
  }
  requests.clear();
  if (!all_done) process_->leave_open();
}

void MpiCommunicator::give_up_all(Group& group) {
  for (std::vector<MPI_Request>* requests : {&group.call_receipts, &group.call_sends, &requests_[0], &requests_[1]})
    give_up(*requests);
}

void MpiCommunicator::post(Group& group, bool is_send, float* data, std::int64_t count, int member, int tag,
                           std::vector<MPI_Request>& requests) {
  for (std::int64_t begin = 0; begin < count; begin += most_message_elements) {
    const int piece = static_cast<int>(std::min(count - begin, most_message_elements));
    MPI_Request& request = requests.emplace_back(MPI_REQUEST_NULL);
    if (is_send)
      PARPLAN_MPI(MPI_Isend(data + begin, piece, MPI_FLOAT, member, tag, group.comm, &request));
    else
      PARPLAN_MPI(MPI_Irecv(data + begin, piece, MPI_FLOAT, member, tag, group.comm, &request));
  }
}

void MpiCommunicator::announce(Group& group, Collective collective, std::int64_t count, const float* small_data) {
  process_->check();
  group.own_call.head = {.collective = collective, .count = count};
  std::size_t bytes = call_head_bytes;
  if (small_data != nullptr) {
    std::copy_n(small_data, count, group.own_call.data.data());
    bytes += static_cast<std::size_t>(count) * sizeof(float);
  }
  const std::lock_guard lock(process_->calls());
  for (int step = 1; step < group.members(); ++step) {
    const int from = (group.member + step) % group.members();
    MPI_Request& receipt = group.call_receipts.emplace_back(MPI_REQUEST_NULL);
    PARPLAN_MPI(MPI_Irecv(&group.calls[from], sizeof(Call), MPI_BYTE, from, call_tag, group.comm, &receipt));
  }
  for (int step = 1; step < group.members(); ++step) {
    const int to = (group.member + step) % group.members();
    MPI_Request& sent = group.call_sends.emplace_back(MPI_REQUEST_NULL);
    PARPLAN_MPI(MPI_Isend(&group.own_call, static_cast<int>(bytes), MPI_BYTE, to, call_tag, group.comm, &sent));
  }
}

Clock::time_point MpiCommunicator::meet(Group& group) {
  wait_for(group.call_receipts, group.ranks);
  const Clock::time_point met = Clock::now();
  for (int i = 0; i < group.members(); ++i)
    if (i != group.member) check_same_call(group.id, rank(), group.own_call.head, group.ranks[i], group.calls[i].head);
  wait_for(group.call_sends, group.ranks);
  return met;
}

// Member i's chunk becomes the sum (or maximum) of all members' chunks at member i. It works in
// pieces, of which two are in flight: while one is added up, the next one moves.
void MpiCommunicator::reduce_chunks(Group& group, InOrder adder, float* data, std::int64_t count,
                                    Clock::time_point& met) {
  const int members = group.members();
  const std::int64_t piece_elements = static_cast<std::int64_t>(scratch_.size() / (2 * inputs_.size()));
  const std::int64_t longest_chunk = (count + members - 1) / members;
  const std::int64_t pieces = (longest_chunk + piece_elements - 1) / piece_elements;
  const auto piece_of = [&](int member, std::int64_t piece) {
    const Chunk chunk = chunk_of(count, members, member);
    const std::int64_t begin = std::min(chunk.begin + piece * piece_elements, chunk.end);
    return Chunk{.begin = begin, .end = std::min(begin + piece_elements, chunk.end)};
  };
  const auto scratch_of = [&](std::int64_t piece, int member) {
    return scratch_.data() + static_cast<std::size_t>(((piece % 2) * members + member) * piece_elements);
  };
  const auto post_piece = [&](std::int64_t piece) {
    const std::lock_guard lock(process_->calls());
    std::vector<MPI_Request>& requests = requests_[piece % 2];
    const Chunk own = piece_of(group.member, piece);
    for (int step = 1; step < members; ++step) {
      const int from = (group.member + members - step) % members;
      post(group, false, scratch_of(piece, from), own.end - own.begin, from, reduce_tag, requests);
    }
    for (int step = 1; step < members; ++step) {
      const int to = (group.member + step) % members;
      const Chunk theirs = piece_of(to, piece);
      post(group, true, data + theirs.begin, theirs.end - theirs.begin, to, reduce_tag, requests);
    }
  };
  if (pieces > 0) post_piece(0);
  met = meet(group);
  for (std::int64_t piece = 0; piece < pieces; ++piece) {
    if (piece + 1 < pieces) post_piece(piece + 1);
    wait_for(requests_[piece % 2], group.ranks);
    const Chunk own = piece_of(group.member, piece);
    for (int i = 0; i < members; ++i) inputs_[i] = i == group.member ? data + own.begin : scratch_of(piece, i);
    adder(data + own.begin, inputs_.data(), members, own.end - own.begin);
  }
}

void MpiCommunicator::post_gather(Group& group, float* data, std::int64_t count) {
  const std::lock_guard lock(process_->calls());
  const int members = group.members();
  const Chunk own = chunk_of(count, members, group.member);
  for (int step = 1; step < members; ++step) {
    const int from = (group.member + members - step) % members;
    const Chunk theirs = chunk_of(count, members, from);
    post(group, false, data + theirs.begin, theirs.end - theirs.begin, from, gather_tag, requests_[0]);
  }
  for (int step = 1; step < members; ++step)
    post(group, true, data + own.begin, own.end - own.begin, (group.member + step) % members, gather_tag, requests_[0]);
}

void MpiCommunicator::post_exchange(Group& group, float* from, float* to, std::int64_t chunk) {
  const std::lock_guard lock(process_->calls());
  const int members = group.members();
  for (int step = 1; step < members; ++step) {
    const int source = (group.member + members - step) % members;
    post(group, false, to + source * chunk, chunk, source, exchange_tag, requests_[0]);
  }
  for (int step = 1; step < members; ++step) {
    const int destination = (group.member + step) % members;
    post(group, true, from + destination * chunk, chunk, destination, exchange_tag, requests_[0]);
  }
}

float* checked(const Elements& data) {
  // TF32 is a way of multiplying: in memory it is fp32.
  PARPLAN_ASSERT((data.type == DataType::fp32 || data.type == DataType::tf32) && data.count >= 0,
                 fmt::format("{} elements of {} between ranks that are processes", data.count, name(data.type)));
  return static_cast<float*>(data.data);
}

// Runs one collective; cancels its messages when it throws.
template <class Body, class GiveUp>
Transfer carried_out(const Body& body, const GiveUp& give_up, Bytes sent) {
  const auto begin = Clock::now();
  Clock::time_point met = begin;
  try {
    body(met);
  } catch (...) {
    give_up();
    throw;
  }
  return carried_out_since(begin, met, sent);
}

Transfer MpiCommunicator::all_reduce(StreamId, int id, Reduction reduction, Elements elements) {
  float* data = checked(elements);
  const std::int64_t count = elements.count;
  Group& group = group_of(id);
  if (group.members() == 1) return {};
  const bool sum = reduction == Reduction::sum;
  const InOrder adder = sum ? host_.sum : host_.max;
  return carried_out(
      [&](Clock::time_point& met) {
        announce(group, all_reduce_of(reduction), count,
                 count <= small_count ? data : nullptr);
        if (count <= small_count) {
          met = meet(group);
          for (int i = 0; i < group.members(); ++i)
            inputs_[i] = i == group.member ? data : group.calls[i].data.data();
          adder(data, inputs_.data(), group.members(), count);
        } else {
          reduce_chunks(group, adder, data, count, met);
          post_gather(group, data, count);
          wait_for(requests_[0], group.ranks);
        }
      },
      [&] { give_up_all(group); }, all_reduce_bytes(count, size_of(elements.type), group.members(), group.member));
}

Transfer MpiCommunicator::reduce_scatter(StreamId, int id, Elements elements) {
  float* data = checked(elements);
  Group& group = group_of(id);
  if (group.members() == 1) return {};
  return carried_out(
      [&](Clock::time_point& met) {
        announce(group, Collective::reduce_scatter, elements.count, nullptr);
        reduce_chunks(group, host_.sum, data, elements.count, met);
      },
      [&] { give_up_all(group); },
      reduce_scatter_bytes(elements.count, size_of(elements.type), group.members(), group.member));
}

Transfer MpiCommunicator::all_gather(StreamId, int id, Elements elements) {
  float* data = checked(elements);
  Group& group = group_of(id);
  if (group.members() == 1) return {};
  return carried_out(
      [&](Clock::time_point& met) {
        announce(group, Collective::all_gather, elements.count, nullptr);
        post_gather(group, data, elements.count);
        met = meet(group);
        wait_for(requests_[0], group.ranks);
      },
      [&] { give_up_all(group); },
      all_gather_bytes(elements.count, size_of(elements.type), group.members(), group.member));
}

Transfer MpiCommunicator::all_to_all(StreamId, int id, Elements from, Elements to) {
  float* sent = checked(from);
  float* received = checked(to);
  Group& group = group_of(id);
  all_to_all_chunk(from, to, group.members());
  const std::int64_t chunk = from.count / group.members();
  std::copy_n(sent + group.member * chunk, chunk, received + group.member * chunk);
  if (group.members() == 1) return {};
  return carried_out(
      [&](Clock::time_point& met) {
        announce(group, Collective::all_to_all, from.count, nullptr);
        post_exchange(group, sent, received, chunk);
        met = meet(group);
        wait_for(requests_[0], group.ranks);
      },
      [&] { give_up_all(group); }, all_to_all_bytes(from.count, size_of(from.type), group.members()));
}

// Removes finished sends from the front of the line, with `calls` held.
void MpiCommunicator::retire_sends(Line& line) {
  while (!line.outstanding.empty()) {
    int done = 0;
    PARPLAN_MPI(MPI_Test(&line.outstanding.front(), &done, MPI_STATUS_IGNORE));
    if (!done) return;
    line.outstanding.pop_front();
    ++line.first;
  }
}

// The first member's data becomes the sum of all members' data, in pieces as in reduce_chunks.
void MpiCommunicator::reduce_on_first(Group& group, float* data, std::int64_t count, Clock::time_point& met) {
  const int members = group.members();
  const std::int64_t piece_elements = static_cast<std::int64_t>(scratch_.size() / (2 * inputs_.size()));
  const std::int64_t pieces = (count + piece_elements - 1) / piece_elements;
  const auto scratch_of = [&](std::int64_t piece, int member) {
    return scratch_.data() + static_cast<std::size_t>(((piece % 2) * members + member) * piece_elements);
  };
  const auto post_piece = [&](std::int64_t piece) {
    const std::lock_guard lock(process_->calls());
    const std::int64_t begin = piece * piece_elements, elements = std::min(piece_elements, count - begin);
    if (group.member > 0) return post(group, true, data + begin, elements, 0, first_tag, requests_[piece % 2]);
    for (int from = 1; from < members; ++from)
      post(group, false, scratch_of(piece, from), elements, from, first_tag, requests_[piece % 2]);
  };
  if (pieces > 0) post_piece(0);
  met = meet(group);
  for (std::int64_t piece = 0; piece < pieces; ++piece) {
    if (piece + 1 < pieces) post_piece(piece + 1);
    wait_for(requests_[piece % 2], group.ranks);
    if (group.member > 0) continue;
    float* const own = data + piece * piece_elements;
    for (int i = 0; i < members; ++i) inputs_[i] = i == 0 ? own : scratch_of(piece, i);
    host_.sum(own, inputs_.data(), members, std::min(piece_elements, count - piece * piece_elements));
  }
}

Transfer MpiCommunicator::with_first(Collective collective, int id, bool first_sends, float* data, std::int64_t count,
                                     std::int64_t stride, Bytes sent) {
  Group& group = group_of(id);
  return carried_out(
      [&](Clock::time_point& met) {
        announce(group, collective, count, nullptr);
        {
          const std::lock_guard lock(process_->calls());
          if (group.member > 0)
            post(group, !first_sends, data, count, 0, first_tag, requests_[0]);
          else
            for (int other = 1; other < group.members(); ++other)
              post(group, first_sends, data + other * stride, count, other, first_tag, requests_[0]);
        }
        met = meet(group);
        wait_for(requests_[0], group.ranks);
      },
      [&] { give_up_all(group); }, sent);
}

Transfer MpiCommunicator::broadcast(StreamId, int id, Elements elements) {
  const Group& group = group_of(id);
  if (group.members() == 1) return {};
  return with_first(Collective::broadcast, id, true, checked(elements), elements.count, 0,
                    broadcast_bytes(elements.count, size_of(elements.type), group.members(), group.member));
}

Transfer MpiCommunicator::reduce(StreamId, int id, Elements elements) {
  float* data = checked(elements);
  Group& group = group_of(id);
  if (group.members() == 1) return {};
  return carried_out(
      [&](Clock::time_point& met) {
        announce(group, Collective::reduce, elements.count, nullptr);
        reduce_on_first(group, data, elements.count, met);
      },
      [&] { give_up_all(group); }, to_first_bytes(elements.count, size_of(elements.type), group.member));
}

Transfer MpiCommunicator::gather(StreamId, int id, Elements own, Elements whole) {
  float *part = checked(own), *all = checked(whole);
  const Group& group = group_of(id);
  check_parts(own, whole, group.members(), group.member);
  if (group.member == 0) std::copy_n(part, own.count, all);
  if (group.members() == 1) return {};
  return with_first(Collective::gather, id, false, group.member == 0 ? all : part, own.count, own.count,
                    to_first_bytes(own.count, size_of(own.type), group.member));
}

Transfer MpiCommunicator::scatter(StreamId, int id, Elements whole, Elements own) {
  float *part = checked(own), *all = checked(whole);
  const Group& group = group_of(id);
  check_parts(own, whole, group.members(), group.member);
  if (group.member == 0) std::copy_n(all, own.count, part);
  if (group.members() == 1) return {};
  return with_first(Collective::scatter, id, true, group.member == 0 ? all : part, own.count, own.count,
                    broadcast_bytes(own.count, size_of(own.type), group.members(), group.member));
}

SendTicket MpiCommunicator::send(StreamId, int destination, int channel, Elements elements) {
  float* data = checked(elements);
  PARPLAN_ASSERT(elements.count <= INT_MAX, fmt::format("a send of {} elements", elements.count));
  Line& line = line_of(destination, channel);
  process_->check();
  process_->wait_until(
      [&] {
        retire_sends(line);
        return line.outstanding.size() < most_outstanding_sends;
      },
      std::array{destination});
  const std::lock_guard lock(process_->calls());
  const std::int64_t number = line.first + static_cast<std::int64_t>(line.outstanding.size());
  MPI_Request& request = line.outstanding.emplace_back(MPI_REQUEST_NULL);
  PARPLAN_MPI(
      MPI_Isend(data, static_cast<int>(elements.count), MPI_FLOAT, destination, channel, point_to_point_, &request));
  return {.destination = destination,
          .channel = channel,
          .number = number,
          .bytes = Bytes(elements.count * size_of(elements.type))};
}

Transfer MpiCommunicator::wait_sent(StreamId, SendTicket ticket) {
  const auto begin = Clock::now();
  Line& line = line_of(ticket.destination, ticket.channel);
  process_->wait_until(
      [&] {
        retire_sends(line);
        return line.first > ticket.number;
      },
      std::array{ticket.destination});
  return waited_since(begin, ticket.bytes);
}

Transfer MpiCommunicator::receive(StreamId, int source, int channel, Elements elements) {
  float* data = checked(elements);
  line_of(source, channel);  // asserts that there is such a line
  process_->check();
  const auto begin = Clock::now();
  MPI_Message message = MPI_MESSAGE_NULL;
  MPI_Status status;
  process_->wait_until(
      [&] {
        int found = 0;
        PARPLAN_MPI(MPI_Improbe(source, channel, point_to_point_, &found, &message, &status));
        return found != 0;
      },
      std::array{source});
  const auto met = Clock::now();
  int count = 0;
  std::vector<MPI_Request>& requests = requests_[0];
  {
    const std::lock_guard lock(process_->calls());
    PARPLAN_MPI(MPI_Get_count(&status, MPI_FLOAT, &count));
    PARPLAN_ASSERT(count == elements.count, fmt::format("rank {} sends {} elements on channel {}, rank {} receives {}",
                                                        source, count, channel, rank(), elements.count));
    PARPLAN_MPI(MPI_Imrecv(data, count, MPI_FLOAT, &message, &requests.emplace_back(MPI_REQUEST_NULL)));
  }
  try {
    wait_for(requests, {source});
  } catch (...) {
    give_up(requests);
    throw;
  }
  return carried_out_since(begin, met, Bytes(0));
}

}  // namespace

std::unique_ptr<Communicator> make_mpi_communicator(std::shared_ptr<MpiProcess> process, const MpiHost& host,
                                                    const std::vector<CommunicationGroup>& groups, int channels) {
  return std::make_unique<MpiCommunicator>(std::move(process), host, groups, channels);
}

}  // namespace parplan
