#include "runtime/launch/tcp_communicator.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "runtime/comm/collective_call.h"
#include "runtime/device/cpu/host_reduction.h"
#include "runtime/launch/tcp_socket.h"

namespace parplan {
namespace {

using Clock = std::chrono::steady_clock;

// Up to this size an all-reduce is one message to every other member.
constexpr std::int64_t most_small_elements = 1024;
constexpr std::int64_t most_unsent = 64;
// Elements per message of a reduction, two of which are in flight: enough that messages are few,
// and few enough that received data is added from the cache.
constexpr std::int64_t reduction_piece = 64 * 1024;
// How long the processes wait for each other's connections, how often they look whether the job has
// failed meanwhile, and how long the end of a connection may come before its reason.
constexpr std::chrono::seconds connect_patience(60);
constexpr std::chrono::milliseconds look_interval(20);
constexpr std::chrono::seconds reason_patience(1);
// Looks for data before the process sleeps until some comes.
constexpr int eager_looks = 50;

// What a message belongs to: the messages of one key between two ranks match in order.
enum class Purpose : std::uint32_t { call, reduction, gathering, exchange, channel, with_first };
struct MessageKey {
  Purpose purpose{};
  std::uint32_t number = 0;  // of the group or channel
  bool operator==(const MessageKey&) const = default;
};
struct MessageHead {
  MessageKey key;
  std::uint64_t bytes = 0;
};

struct OutgoingMessage {
  MessageHead head;
  const std::byte* data = nullptr;
  std::size_t sent = 0;  // of head and data
  std::int64_t* done = nullptr;  // counts it when it is sent
};
struct PostedReceipt {
  MessageKey key;
  std::byte* data = nullptr;
  std::uint64_t bytes = 0;
  std::int64_t* done = nullptr;
};
// A message that came, or begins to come, before it was asked for.
struct EarlyMessage {
  MessageKey key;
  std::vector<std::byte> data;
  bool is_whole = false;
};

// The connection to another rank.
struct RankLink {
  int rank = 0;
  Socket socket;
  bool closed = false;
  std::deque<OutgoingMessage> outgoing;
  std::list<PostedReceipt> receipts;
  std::list<EarlyMessage> early;
  // The message that is coming in.
  MessageHead head;
  std::size_t received = 0;  // of head and data
  std::byte* target = nullptr;
  std::int64_t* done = nullptr;   // of the receipt that it matches,
  EarlyMessage* kept = nullptr;   // or where it is kept
};

std::uint64_t random_number() {
  std::uint64_t number = 0;
  if (getrandom(&number, sizeof number, 0) != static_cast<ssize_t>(sizeof number))
    throw RunError(fmt::format("random numbers: {}", std::strerror(errno)));
  return number;
}

// Where a process listens for the others, as it tells them.
struct ListeningPlace {
  std::uint64_t secret = 0;  // which those that connect have to know
  std::int64_t port = 0;
  std::array<char, 256> address{};
};
// The first that a connecting process says.
struct Introduction {
  std::uint64_t secret = 0;
  std::int64_t rank = 0;
};

// A connection that has not said whose it is.
struct Stranger {
  Socket socket;
  Clock::time_point since;
  Introduction said = {};
  std::size_t bytes = 0;  // of it
};

// Reads what has arrived of the introduction; false where there will be no more of it.
bool hear(Stranger& stranger) {
  auto* const said = reinterpret_cast<std::byte*>(&stranger.said);
  const ssize_t count =
      recv(stranger.socket.get(), said + stranger.bytes, sizeof stranger.said - stranger.bytes, MSG_DONTWAIT);
  if (count > 0) stranger.bytes += static_cast<std::size_t>(count);
  return count > 0 || (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR));
}

float* fp32(const Elements& data) {
  PARPLAN_ASSERT((data.type == DataType::fp32 || data.type == DataType::tf32) && data.count >= 0,
                 fmt::format("{} elements of {} between ranks that are processes", data.count, name(data.type)));
  return static_cast<float*>(data.data);
}

class TcpCommunicator final : public Communicator {
 public:
  TcpCommunicator(Rendezvous& job, const std::string& address, std::chrono::milliseconds silence,
                  const std::vector<CommunicationGroup>& groups, int channels);

  int rank() const override { return job_.process(); }
  int ranks() const override { return job_.processes(); }
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
  void check() override { job_.check(); }
  void abort(const std::string& reason) override { job_.fail(fmt::format("rank {} stopped: {}", rank(), reason)); }

 private:
  struct Group {
    int id = 0;
    std::vector<int> ranks;
    int member = 0;
    CollectiveCall own_call;
    std::vector<CollectiveCall> calls;      // by member
    std::vector<std::vector<float>> small;  // contributions to a small all-reduce, by member
    int members() const { return static_cast<int>(ranks.size()); }
  };
  // Sends to one destination on one channel.
  struct Line {
    std::int64_t posted = 0;
    std::int64_t done = 0;
  };
  // Messages of one round of a collective.
  struct Round {
    std::int64_t posted = 0;
    std::int64_t done = 0;
  };

  void connect(const std::string& address, std::chrono::milliseconds silence);
  void accept_from(const Socket& listener, std::uint64_t secret, std::chrono::milliseconds silence);
  Group& group_of(int id);
  Line& line_of(int destination, int channel);
  RankLink& link_of(int other) { return links_[static_cast<std::size_t>(other)]; }

  void post_send(int to, MessageKey key, const void* data, std::int64_t bytes, std::int64_t* done);
  void post_receipt(int from, MessageKey key, void* data, std::int64_t bytes, std::int64_t* done);
  // Sends and receives what can be at once; whether anything was.
  bool progress();
  bool push(RankLink& link);
  bool pull(RankLink& link);
  void begin_message(RankLink& link);
  void end_message(RankLink& link);
  // Returns when `ready`; RunError once the job has failed.
  template <class Ready>
  void wait_until(const Ready& ready);
  void sleep_until_data(Clock::time_point& closed_since);

  // Tells every other member which collective this is, and learns it of them.
  Clock::time_point meet(Group& group, Collective collective, std::int64_t count, const float* small);
  void reduce_chunk(Group& group, InOrder adder, float* data, std::int64_t count);
  void gather_chunks(Group& group, float* data, std::int64_t count);
  void reduce_on_first(Group& group, float* data, std::int64_t count);
  // Between the first member and every other one: `stride` elements apart on the first.
  Transfer with_first(Group& group, Collective collective, bool first_sends, float* data, std::int64_t count,
                      std::int64_t stride, Bytes sent);

  Rendezvous& job_;
  int channels_;
  InOrder sum_ = host_sum_in_order();
  InOrder max_ = host_max_in_order();
  std::vector<RankLink> links_;  // by rank; the own one is empty
  std::vector<Group> groups_;
  std::vector<Line> lines_;
  std::vector<float> scratch_;
  std::vector<const float*> inputs_;
  std::vector<pollfd> polled_;
};

TcpCommunicator::TcpCommunicator(Rendezvous& job, const std::string& address, std::chrono::milliseconds silence,
                                 const std::vector<CommunicationGroup>& groups, int channels)
    : job_(job), channels_(channels), links_(static_cast<std::size_t>(job.processes())) {
  PARPLAN_ASSERT(channels >= 0, fmt::format("{} channels", channels));
  std::size_t most_members = 1;
  for (const CommunicationGroup& group : groups) {
    const std::vector<int>& members = group.ranks;
    PARPLAN_ASSERT(!members.empty() && members.front() >= 0 && members.back() < ranks() &&
                       std::ranges::adjacent_find(members, std::greater_equal<>()) == members.end(),
                   fmt::format("group {} of {} ranks, {} in all", group.id, members.size(), ranks()));
    const auto own = std::ranges::find(members, rank());
    if (own == members.end()) continue;
    for (const Group& earlier : groups_)
      PARPLAN_ASSERT(earlier.id != group.id, fmt::format("two groups have id {}", group.id));
    const std::vector<float> small(most_small_elements);
    groups_.push_back({.id = group.id,
                       .ranks = members,
                       .member = static_cast<int>(own - members.begin()),
                       .own_call = {},
                       .calls = std::vector<CollectiveCall>(members.size()),
                       .small = std::vector<std::vector<float>>(members.size(), small)});
    most_members = std::max(most_members, members.size());
  }
  lines_.resize(links_.size() * static_cast<std::size_t>(channels));
  inputs_.resize(most_members);
  if (most_members > 1) scratch_.resize(2 * most_members * static_cast<std::size_t>(reduction_piece));
  connect(address, silence);
}

void TcpCommunicator::connect(const std::string& address, std::chrono::milliseconds silence) {
  const Socket listener = listen_at(address, 0);
  ListeningPlace own{.secret = random_number(), .port = own_port(listener)};
  PARPLAN_ASSERT(address.size() < own.address.size(), address);
  std::ranges::copy(address, own.address.begin());
  const auto all = job_.all_gather(std::as_bytes(std::span(&own, 1)));
  for (int other = 0; other < ranks(); ++other) link_of(other).rank = other;
  // The higher rank connects to the lower one, which finds it in its queue of connections whenever
  // it looks: nobody waits in a cycle.
  for (int other = 0; other < rank(); ++other) {
    ListeningPlace place;
    if (all[static_cast<std::size_t>(other)].size() != sizeof place)
      throw RunError(fmt::format("rank {} does not say where it listens", other));
    std::memcpy(&place, all[static_cast<std::size_t>(other)].data(), sizeof place);
    place.address.back() = '\0';
    const auto deadline = Clock::now() + connect_patience;
    std::string failure;
    Socket socket;
    while (!(socket = connect_once(place.address.data(), static_cast<int>(place.port),
                                   std::min(deadline, Clock::now() + std::chrono::seconds(1)), failure))) {
      job_.check();
      if (Clock::now() > deadline)
        throw RunError(fmt::format("rank {} cannot reach rank {} at {}: {}", rank(), other,
                                   address_text(place.address.data(), static_cast<int>(place.port)), failure));
      std::this_thread::sleep_for(look_interval);
    }
    prepare_connection(socket, silence);
    const Introduction introduction{.secret = place.secret, .rank = rank()};
    if (::send(socket.get(), &introduction, sizeof introduction, MSG_NOSIGNAL) !=
        static_cast<ssize_t>(sizeof introduction))
      throw RunError(fmt::format("rank {} cannot speak to rank {}: {}", rank(), other, std::strerror(errno)));
    link_of(other).socket = std::move(socket);
  }
  accept_from(listener, own.secret, silence);
  for (const RankLink& link : links_)
    if (link.socket) fcntl(link.socket.get(), F_SETFL, O_NONBLOCK);
}

// Accepts the connections of all higher ranks. One that does not say the secret soon is none,
// and keeps no other waiting.
void TcpCommunicator::accept_from(const Socket& listener, std::uint64_t secret, std::chrono::milliseconds silence) {
  const auto deadline = Clock::now() + connect_patience;
  std::vector<Stranger> strangers;  // oldest first
  int missing = ranks() - 1 - rank();
  while (missing > 0) {
    job_.check();
    const auto now = Clock::now();
    if (now > deadline)
      throw RunError(fmt::format("rank {} waited in vain for connections of {} other ranks", rank(), missing));
    std::erase_if(strangers, [&](const Stranger& stranger) { return now - stranger.since > stranger_patience; });
    if (strangers.size() >= most_strangers) strangers.erase(strangers.begin());
    std::vector<pollfd> ready = {{.fd = listener.get(), .events = POLLIN, .revents = 0}};
    for (const Stranger& stranger : strangers)
      ready.push_back({.fd = stranger.socket.get(), .events = POLLIN, .revents = 0});
    if (poll(ready.data(), ready.size(), static_cast<int>(look_interval.count())) <= 0) continue;

    std::vector<Stranger> remaining;
    for (std::size_t s = 0; s < strangers.size(); ++s) {
      if (ready[s + 1].revents != 0 && !hear(strangers[s])) continue;
      const Introduction& said = strangers[s].said;
      if (strangers[s].bytes < sizeof said) {
        remaining.push_back(std::move(strangers[s]));
      } else if (said.secret == secret && said.rank > rank() && said.rank < ranks() &&
                 !link_of(static_cast<int>(said.rank)).socket) {
        link_of(static_cast<int>(said.rank)).socket = std::move(strangers[s].socket);
        --missing;
      }
    }
    strangers = std::move(remaining);
    if (ready[0].revents == 0) continue;
    Socket socket(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!socket) {
      std::this_thread::sleep_for(look_interval);  // no descriptors, perhaps
      continue;
    }
    prepare_connection(socket, silence);
    strangers.push_back({.socket = std::move(socket), .since = Clock::now()});
  }
}

TcpCommunicator::Group& TcpCommunicator::group_of(int id) {
  for (Group& group : groups_)
    if (group.id == id) return group;
  throw InternalError(fmt::format("rank {} is no member of group {}", rank(), id));
}

TcpCommunicator::Line& TcpCommunicator::line_of(int destination, int channel) {
  PARPLAN_ASSERT(destination >= 0 && destination < ranks() && destination != rank() && channel >= 0 &&
                     channel < channels_,
                 fmt::format("between rank {} and rank {} on channel {}: {} ranks, {} channels", rank(), destination,
                             channel, ranks(), channels_));
  return lines_[static_cast<std::size_t>(destination) * static_cast<std::size_t>(channels_) +
                static_cast<std::size_t>(channel)];
}

void TcpCommunicator::post_send(int to, MessageKey key, const void* data, std::int64_t bytes, std::int64_t* done) {
  RankLink& link = link_of(to);
  if (link.closed) job_.check();
  link.outgoing.push_back({.head = {.key = key, .bytes = static_cast<std::uint64_t>(bytes)},
                           .data = static_cast<const std::byte*>(data),
                           .sent = 0,
                           .done = done});
  push(link);
}

void TcpCommunicator::post_receipt(int from, MessageKey key, void* data, std::int64_t bytes, std::int64_t* done) {
  RankLink& link = link_of(from);
  const auto found = std::ranges::find(link.early, key, &EarlyMessage::key);
  if (found == link.early.end()) {
    link.receipts.push_back({.key = key,
                             .data = static_cast<std::byte*>(data),
                             .bytes = static_cast<std::uint64_t>(bytes),
                             .done = done});
    return;
  }
  // (It is rare that this is only half there: then the rest is waited for.)
  wait_until([&] { return found->is_whole; });
  PARPLAN_ASSERT(found->data.size() == static_cast<std::size_t>(bytes),
                 fmt::format("rank {} sends {} bytes, rank {} expects {}", from, found->data.size(), rank(), bytes));
  if (bytes > 0) std::memcpy(data, found->data.data(), found->data.size());
  link.early.erase(found);
  ++*done;
}

bool TcpCommunicator::push(RankLink& link) {
  bool moved = false;
  while (!link.closed && !link.outgoing.empty()) {
    OutgoingMessage& message = link.outgoing.front();
    const std::size_t head = sizeof(MessageHead);
    const std::byte* from = message.sent < head ? reinterpret_cast<const std::byte*>(&message.head) + message.sent
                                                : message.data + (message.sent - head);
    const std::size_t size = message.sent < head ? head - message.sent : head + message.head.bytes - message.sent;
    const bool more = message.sent < head && message.head.bytes > 0;
    const ssize_t count =
        size == 0 ? 0 : ::send(link.socket.get(), from, size, MSG_NOSIGNAL | MSG_DONTWAIT | (more ? MSG_MORE : 0));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      link.closed = errno != EAGAIN && errno != EWOULDBLOCK;
      return moved;
    }
    moved = true;
    message.sent += static_cast<std::size_t>(count);
    if (message.sent < head + message.head.bytes) continue;
    ++*message.done;
    link.outgoing.pop_front();
  }
  return moved;
}

// Where the message goes whose head has come.
void TcpCommunicator::begin_message(RankLink& link) {
  const auto found = std::ranges::find(link.receipts, link.head.key, &PostedReceipt::key);
  if (found == link.receipts.end()) {
    link.kept = &link.early.emplace_back();
    link.kept->key = link.head.key;
    link.kept->data.resize(link.head.bytes);
    link.target = link.kept->data.data();
    return;
  }
  PARPLAN_ASSERT(found->bytes == link.head.bytes, fmt::format("rank {} sends {} bytes, rank {} expects {}", link.rank,
                                                              link.head.bytes, rank(), found->bytes));
  link.target = found->data;
  link.done = found->done;
  link.receipts.erase(found);
}

void TcpCommunicator::end_message(RankLink& link) {
  if (link.done != nullptr) ++*link.done;
  if (link.kept != nullptr) link.kept->is_whole = true;
  link.done = nullptr;
  link.kept = nullptr;
  link.received = 0;
}

bool TcpCommunicator::pull(RankLink& link) {
  constexpr std::size_t head = sizeof(MessageHead);
  bool moved = false;
  while (!link.closed) {
    const bool in_head = link.received < head;
    std::byte* to = in_head ? reinterpret_cast<std::byte*>(&link.head) + link.received
                            : link.target + (link.received - head);
    const std::size_t size = in_head ? head - link.received : head + link.head.bytes - link.received;
    const ssize_t count = ::recv(link.socket.get(), to, size, MSG_DONTWAIT);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      link.closed = count == 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
      return moved;
    }
    moved = true;
    link.received += static_cast<std::size_t>(count);
    if (in_head && link.received == head) begin_message(link);
    if (link.received >= head && link.received == head + link.head.bytes) end_message(link);
  }
  return moved;
}

bool TcpCommunicator::progress() {
  bool moved = false;
  for (RankLink& link : links_) {
    if (!link.socket) continue;
    moved = push(link) || moved;
    moved = pull(link) || moved;
  }
  return moved;
}

// The rendezvous learns why a connection ended; if it does not, the end is the reason.
void TcpCommunicator::sleep_until_data(Clock::time_point& closed_since) {
  job_.check();
  polled_.clear();
  int closed = -1;
  for (const RankLink& link : links_) {
    if (!link.socket) continue;
    if (link.closed && (!link.receipts.empty() || !link.outgoing.empty() || link.received > 0)) closed = link.rank;
    if (link.closed) continue;
    polled_.push_back({.fd = link.socket.get(),
                       .events = static_cast<short>(link.outgoing.empty() ? POLLIN : POLLIN | POLLOUT),
                       .revents = 0});
  }
  if (closed < 0) closed_since = Clock::now();
  else if (Clock::now() - closed_since > reason_patience)
    job_.fail(fmt::format("rank {} was lost: its connection to rank {} closed", closed, rank()));
  poll(polled_.data(), polled_.size(), static_cast<int>(look_interval.count()));
}

template <class Ready>
void TcpCommunicator::wait_until(const Ready& ready) {
  Clock::time_point closed_since = Clock::now();
  try {
    for (int looks = 0; !ready();) {
      if (progress()) looks = 0;
      else if (++looks > eager_looks) sleep_until_data(closed_since);
    }
  } catch (...) {
    // The memory that messages point to may go: nothing moves any more.
    for (RankLink& link : links_) link.closed = true;
    throw;
  }
}

Clock::time_point TcpCommunicator::meet(Group& group, Collective collective, std::int64_t count, const float* small) {
  job_.check();
  group.own_call = {.collective = collective, .count = count};
  const MessageKey key{.purpose = Purpose::call, .number = static_cast<std::uint32_t>(group.id)};
  Round round;
  for (int i = 0; i < group.members(); ++i) {
    if (i == group.member) continue;
    post_receipt(group.ranks[i], key, &group.calls[i], sizeof(CollectiveCall), &round.done);
    post_send(group.ranks[i], key, &group.own_call, sizeof(CollectiveCall), &round.done);
    round.posted += 2;
  }
  wait_until([&] { return round.done == round.posted; });
  const Clock::time_point met = Clock::now();
  for (int i = 0; i < group.members(); ++i)
    if (i != group.member) check_same_call(group.id, rank(), group.own_call, group.ranks[i], group.calls[i]);
  if (small == nullptr) return met;
  const MessageKey data_key{.purpose = Purpose::reduction, .number = key.number};
  const std::int64_t bytes = count * static_cast<std::int64_t>(sizeof(float));
  round = {};
  for (int i = 0; i < group.members(); ++i) {
    if (i == group.member) continue;
    post_receipt(group.ranks[i], data_key, group.small[i].data(), bytes, &round.done);
    post_send(group.ranks[i], data_key, small, bytes, &round.done);
    round.posted += 2;
  }
  wait_until([&] { return round.done == round.posted; });
  return met;
}

// Member i's chunk becomes the sum (or maximum) of all members' chunks at member i. It works in
// pieces: while one is added up, the next one moves.
void TcpCommunicator::reduce_chunk(Group& group, InOrder adder, float* data, std::int64_t count) {
  const int members = group.members();
  const MessageKey key{.purpose = Purpose::reduction, .number = static_cast<std::uint32_t>(group.id)};
  const std::int64_t longest_chunk = (count + members - 1) / members;
  const std::int64_t pieces = (longest_chunk + reduction_piece - 1) / reduction_piece;
  const auto piece_of = [&](int member, std::int64_t piece) {
    const Chunk chunk = chunk_of(count, members, member);
    const std::int64_t begin = std::min(chunk.begin + piece * reduction_piece, chunk.end);
    return Chunk{.begin = begin, .end = std::min(begin + reduction_piece, chunk.end)};
  };
  const auto scratch_of = [&](std::int64_t piece, int member) {
    return scratch_.data() + ((piece % 2) * members + member) * reduction_piece;
  };
  const auto bytes_of = [](const Chunk& chunk) { return (chunk.end - chunk.begin) * std::int64_t{sizeof(float)}; };
  std::array<Round, 2> rounds;
  const auto post = [&](std::int64_t piece) {
    Round& round = rounds[static_cast<std::size_t>(piece % 2)];
    round = {};
    for (int step = 1; step < members; ++step) {
      const int from = (group.member + members - step) % members, to = (group.member + step) % members;
      const Chunk theirs = piece_of(to, piece);
      post_receipt(group.ranks[from], key, scratch_of(piece, from), bytes_of(piece_of(group.member, piece)),
                   &round.done);
      post_send(group.ranks[to], key, data + theirs.begin, bytes_of(theirs), &round.done);
      round.posted += 2;
    }
  };
  if (pieces > 0) post(0);
  for (std::int64_t piece = 0; piece < pieces; ++piece) {
    if (piece + 1 < pieces) post(piece + 1);
    const Round& round = rounds[static_cast<std::size_t>(piece % 2)];
    wait_until([&] { return round.done == round.posted; });
    const Chunk own = piece_of(group.member, piece);
    for (int i = 0; i < members; ++i) inputs_[i] = i == group.member ? data + own.begin : scratch_of(piece, i);
    adder(data + own.begin, inputs_.data(), members, own.end - own.begin);
  }
}

void TcpCommunicator::gather_chunks(Group& group, float* data, std::int64_t count) {
  const int members = group.members();
  const MessageKey key{.purpose = Purpose::gathering, .number = static_cast<std::uint32_t>(group.id)};
  const Chunk own = chunk_of(count, members, group.member);
  Round round;
  for (int step = 1; step < members; ++step) {
    const int from = (group.member + members - step) % members, to = (group.member + step) % members;
    const Chunk theirs = chunk_of(count, members, from);
    post_receipt(group.ranks[from], key, data + theirs.begin, (theirs.end - theirs.begin) * std::int64_t{sizeof(float)},
                 &round.done);
    post_send(group.ranks[to], key, data + own.begin, (own.end - own.begin) * std::int64_t{sizeof(float)}, &round.done);
    round.posted += 2;
  }
  wait_until([&] { return round.done == round.posted; });
}

Transfer TcpCommunicator::all_reduce(StreamId, int id, Reduction reduction, Elements elements) {
  float* data = fp32(elements);
  const std::int64_t count = elements.count;
  Group& group = group_of(id);
  if (group.members() == 1) return {};
  const bool sum = reduction == Reduction::sum;
  const InOrder adder = sum ? sum_ : max_;
  const bool small = count <= most_small_elements;
  const auto begin = Clock::now();
  const auto met = meet(group, all_reduce_of(reduction), count, small ? data : nullptr);
  if (small) {
    for (int i = 0; i < group.members(); ++i) inputs_[i] = i == group.member ? data : group.small[i].data();
    adder(data, inputs_.data(), group.members(), count);
  } else {
    reduce_chunk(group, adder, data, count);
    gather_chunks(group, data, count);
  }
  return carried_out_since(begin, met, all_reduce_bytes(count, size_of(elements.type), group.members(), group.member));
}

Transfer TcpCommunicator::reduce_scatter(StreamId, int id, Elements elements) {
  float* data = fp32(elements);
  Group& group = group_of(id);
  if (group.members() == 1) return {};
  const auto begin = Clock::now();
  const auto met = meet(group, Collective::reduce_scatter, elements.count, nullptr);
  reduce_chunk(group, sum_, data, elements.count);
  return carried_out_since(begin, met,
                           reduce_scatter_bytes(elements.count, size_of(elements.type), group.members(), group.member));
}

Transfer TcpCommunicator::all_gather(StreamId, int id, Elements elements) {
  float* data = fp32(elements);
  Group& group = group_of(id);
  if (group.members() == 1) return {};
  const auto begin = Clock::now();
  const auto met = meet(group, Collective::all_gather, elements.count, nullptr);
  gather_chunks(group, data, elements.count);
  return carried_out_since(begin, met,
                           all_gather_bytes(elements.count, size_of(elements.type), group.members(), group.member));
}

Transfer TcpCommunicator::all_to_all(StreamId, int id, Elements from, Elements to) {
  float* sent = fp32(from);
  float* received = fp32(to);
  Group& group = group_of(id);
  const int members = group.members();
  const std::int64_t bytes = all_to_all_chunk(from, to, members);
  const std::int64_t chunk = from.count / members;
  std::copy_n(sent + group.member * chunk, chunk, received + group.member * chunk);
  if (members == 1) return {};
  const auto begin = Clock::now();
  const auto met = meet(group, Collective::all_to_all, from.count, nullptr);
  const MessageKey key{.purpose = Purpose::exchange, .number = static_cast<std::uint32_t>(group.id)};
  Round round;
  for (int step = 1; step < members; ++step) {
    const int source = (group.member + members - step) % members, destination = (group.member + step) % members;
    post_receipt(group.ranks[source], key, received + source * chunk, bytes, &round.done);
    post_send(group.ranks[destination], key, sent + destination * chunk, bytes, &round.done);
    round.posted += 2;
  }
  wait_until([&] { return round.done == round.posted; });
  return carried_out_since(begin, met, all_to_all_bytes(from.count, size_of(from.type), members));
}

// The first member's data becomes the sum of all members' data, in pieces as in reduce_chunk.
void TcpCommunicator::reduce_on_first(Group& group, float* data, std::int64_t count) {
  const int members = group.members();
  const MessageKey key{.purpose = Purpose::with_first, .number = static_cast<std::uint32_t>(group.id)};
  const std::int64_t pieces = (count + reduction_piece - 1) / reduction_piece;
  const auto elements_of = [&](std::int64_t piece) {
    return std::min(reduction_piece, count - piece * reduction_piece);
  };
  const auto scratch_of = [&](std::int64_t piece, int member) {
    return scratch_.data() + ((piece % 2) * members + member) * reduction_piece;
  };
  std::array<Round, 2> rounds;
  const auto post = [&](std::int64_t piece) {
    Round& round = rounds[static_cast<std::size_t>(piece % 2)];
    const std::int64_t bytes = elements_of(piece) * std::int64_t{sizeof(float)};
    round = {};
    if (group.member > 0) post_send(group.ranks.front(), key, data + piece * reduction_piece, bytes, &round.done);
    for (int from = 1; from < members && group.member == 0; ++from)
      post_receipt(group.ranks[from], key, scratch_of(piece, from), bytes, &round.done);
    round.posted = group.member > 0 ? 1 : members - 1;
  };
  if (pieces > 0) post(0);
  for (std::int64_t piece = 0; piece < pieces; ++piece) {
    if (piece + 1 < pieces) post(piece + 1);
    const Round& round = rounds[static_cast<std::size_t>(piece % 2)];
    wait_until([&] { return round.done == round.posted; });
    if (group.member > 0) continue;
    float* const own = data + piece * reduction_piece;
    for (int i = 0; i < members; ++i) inputs_[i] = i == 0 ? own : scratch_of(piece, i);
    sum_(own, inputs_.data(), members, elements_of(piece));
  }
}

Transfer TcpCommunicator::with_first(Group& group, Collective collective, bool first_sends, float* data,
                                     std::int64_t count, std::int64_t stride, Bytes sent) {
  const auto begin = Clock::now();
  const auto met = meet(group, collective, count, nullptr);
  const MessageKey key{.purpose = Purpose::with_first, .number = static_cast<std::uint32_t>(group.id)};
  const std::int64_t bytes = count * static_cast<std::int64_t>(sizeof(float));
  Round round;
  const auto move = [&](bool sends, int other, float* place) {
    if (sends)
      post_send(group.ranks[other], key, place, bytes, &round.done);
    else
      post_receipt(group.ranks[other], key, place, bytes, &round.done);
    ++round.posted;
  };
  if (group.member > 0) move(!first_sends, 0, data);
  for (int other = 1; other < group.members() && group.member == 0; ++other)
    move(first_sends, other, data + other * stride);
  wait_until([&] { return round.done == round.posted; });
  return carried_out_since(begin, met, sent);
}

Transfer TcpCommunicator::broadcast(StreamId, int id, Elements elements) {
  Group& group = group_of(id);
  if (group.members() == 1) return {};
  return with_first(group, Collective::broadcast, true, fp32(elements), elements.count, 0,
                    broadcast_bytes(elements.count, size_of(elements.type), group.members(), group.member));
}

Transfer TcpCommunicator::reduce(StreamId, int id, Elements elements) {
  float* data = fp32(elements);
  Group& group = group_of(id);
  if (group.members() == 1) return {};
  const auto begin = Clock::now();
  const auto met = meet(group, Collective::reduce, elements.count, nullptr);
  reduce_on_first(group, data, elements.count);
  return carried_out_since(begin, met, to_first_bytes(elements.count, size_of(elements.type), group.member));
}

Transfer TcpCommunicator::gather(StreamId, int id, Elements own, Elements whole) {
  float *part = fp32(own), *all = fp32(whole);
  Group& group = group_of(id);
  check_parts(own, whole, group.members(), group.member);
  if (group.member == 0) std::copy_n(part, own.count, all);
  if (group.members() == 1) return {};
  return with_first(group, Collective::gather, false, group.member == 0 ? all : part, own.count, own.count,
                    to_first_bytes(own.count, size_of(own.type), group.member));
}

Transfer TcpCommunicator::scatter(StreamId, int id, Elements whole, Elements own) {
  float *part = fp32(own), *all = fp32(whole);
  Group& group = group_of(id);
  check_parts(own, whole, group.members(), group.member);
  if (group.member == 0) std::copy_n(all, own.count, part);
  if (group.members() == 1) return {};
  return with_first(group, Collective::scatter, true, group.member == 0 ? all : part, own.count, own.count,
                    broadcast_bytes(own.count, size_of(own.type), group.members(), group.member));
}

SendTicket TcpCommunicator::send(StreamId, int destination, int channel, Elements elements) {
  float* data = fp32(elements);
  job_.check();
  Line& line = line_of(destination, channel);
  wait_until([&] { return line.posted - line.done < most_unsent; });
  const std::int64_t bytes = elements.count * size_of(elements.type);
  post_send(destination, {.purpose = Purpose::channel, .number = static_cast<std::uint32_t>(channel)}, data, bytes,
            &line.done);
  return {.destination = destination, .channel = channel, .number = line.posted++, .bytes = Bytes(bytes)};
}

Transfer TcpCommunicator::wait_sent(StreamId, SendTicket ticket) {
  const auto begin = Clock::now();
  const Line& line = line_of(ticket.destination, ticket.channel);
  job_.check();
  wait_until([&] { return line.done > ticket.number; });
  return waited_since(begin, ticket.bytes);
}

Transfer TcpCommunicator::receive(StreamId, int source, int channel, Elements elements) {
  float* data = fp32(elements);
  line_of(source, channel);  // asserts that there is such a line
  job_.check();
  const auto begin = Clock::now();
  Round round;
  post_receipt(source, {.purpose = Purpose::channel, .number = static_cast<std::uint32_t>(channel)}, data,
               elements.count * size_of(elements.type), &round.done);
  wait_until([&] { return round.done == 1; });
  return waited_since(begin, Bytes(0));
}

}  // namespace

std::unique_ptr<Communicator> make_tcp_communicator(Rendezvous& job, const std::string& address,
                                                    std::chrono::milliseconds silence,
                                                    const std::vector<CommunicationGroup>& groups, int channels) {
  return std::make_unique<TcpCommunicator>(job, address, silence, groups, channels);
}

}  // namespace parplan
