#include "runtime/launch/tcp_rendezvous.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <new>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "planner/base/error.h"
#include "planner/base/text.h"
#include "runtime/launch/fingerprint.h"
#include "runtime/launch/tcp_communicator.h"
#include "runtime/launch/tcp_socket.h"

namespace parplan {
namespace {

using Clock = std::chrono::steady_clock;
using Bytestring = std::vector<std::byte>;

// "parplan" and the version of the protocol; raise the last byte with every change of the messages.
constexpr std::uint64_t greeting_magic = 0x7061'7270'6c61'6e02;
constexpr std::uint64_t longest_message = std::uint64_t{1} << 32;
// What process 0 may say before its welcome: why there will be none.
constexpr std::uint64_t longest_refusal = std::uint64_t{1} << 20;
// How long a peer may leave a message in its sockets before it counts as lost. Its reader thread
// takes messages immediately.
constexpr std::chrono::seconds send_patience(20);
// Between two attempts to connect.
constexpr std::chrono::milliseconds retry_pause(50);
// The same for messages without which a peer can do: why the job has failed, and farewells.
constexpr std::chrono::milliseconds last_word_patience(500);
// How long a leaving process waits for the others to see it leave.
constexpr std::chrono::seconds farewell_patience(1);
// How much longer than process 0 the others wait for its welcome, at most and as a part of their
// patience: it tells them which processes are missing.
constexpr std::chrono::milliseconds welcome_margin(5000);
constexpr int welcome_margin_part = 4;
// A stranger so old makes room for another one.
constexpr std::chrono::seconds least_stranger_patience(1);
// Between two attempts to accept a connection while there are no descriptors.
constexpr std::chrono::milliseconds accept_pause(100);

// Integers travel with the lowest byte first.
void append(Bytestring& bytes, std::uint64_t value) {
  for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<std::byte>(value >> (8 * i)));
}
std::uint64_t number_at(const std::byte* bytes) {
  std::uint64_t value = 0;
  for (int i = 0; i < 8; ++i) value |= std::to_integer<std::uint64_t>(bytes[i]) << (8 * i);
  return value;
}

// A message: magic, kind and length in one number, then as many bytes.
enum class MessageKind : std::uint64_t {
  greeting = 1,  // process, processes, token, build; the first that a connecting process sends
  welcome,       // everyone is there
  refusal,       // text: why the connection is closed
  contribution,  // to process 0
  everyone,      // from process 0: lengths, then bytes, by process
  failure,       // text: what everybody's calls throw from here on
  farewell,      // the last one
  beat,          // its sender lives: a Position
};
constexpr std::size_t head_bytes = 16;
constexpr int kind_shift = 56;
constexpr std::size_t greeting_bytes = 40;

struct Message {
  MessageKind kind{};
  Bytestring body;
};

Bytestring framed(MessageKind kind, std::span<const std::byte> body) {
  Bytestring frame;
  frame.reserve(head_bytes + body.size());
  append(frame, greeting_magic);
  append(frame, static_cast<std::uint64_t>(kind) << kind_shift | body.size());
  frame.insert(frame.end(), body.begin(), body.end());
  return frame;
}
Bytestring framed(MessageKind kind, const std::string& text) {
  return framed(kind, std::as_bytes(std::span<const char>(text)));
}

// Removes the first whole message from the front of `incoming`, if there is one. Throws RunError
// for data that is no message of at most `longest` bytes.
std::optional<Message> take_message(Bytestring& incoming, std::uint64_t longest = longest_message) {
  if (incoming.size() >= 8 && number_at(incoming.data()) != greeting_magic)
    throw RunError("it does not speak this version of parplan's protocol");
  if (incoming.size() < head_bytes) return std::nullopt;
  const std::uint64_t kind = number_at(incoming.data() + 8) >> kind_shift;
  const std::uint64_t length = number_at(incoming.data() + 8) & ((std::uint64_t{1} << kind_shift) - 1);
  if (kind < 1 || kind > static_cast<std::uint64_t>(MessageKind::beat) || length > longest)
    throw RunError("it does not speak this version of parplan's protocol");
  if (incoming.size() < head_bytes + length) return std::nullopt;
  const auto body = incoming.begin() + head_bytes;
  const auto end = body + static_cast<std::ptrdiff_t>(length);
  Message message{.kind = static_cast<MessageKind>(kind), .body = Bytestring(body, end)};
  incoming.erase(incoming.begin(), end);
  return message;
}

std::string shown(std::chrono::milliseconds time) {
  return fmt::format("{:g} s", std::chrono::duration<double>(time).count());
}

// 0, or the error number; ETIMEDOUT when the peer has taken nothing for `patience`.
int send_all(const Socket& socket, const Bytestring& bytes, std::chrono::milliseconds patience = send_patience) {
  std::size_t sent = 0;
  while (sent < bytes.size()) {
    const ssize_t count = ::send(socket.get(), bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count >= 0) {
      sent += static_cast<std::size_t>(count);
      continue;
    }
    if (errno == EINTR) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) return errno;
    pollfd ready{.fd = socket.get(), .events = POLLOUT, .revents = 0};
    if (poll(&ready, 1, static_cast<int>(patience.count())) == 0) return ETIMEDOUT;
  }
  return 0;
}

bool takes_more(const Socket& socket) {
  pollfd ready{.fd = socket.get(), .events = POLLOUT, .revents = 0};
  return poll(&ready, 1, 0) > 0 && (ready.revents & POLLOUT) != 0;
}

enum class Received { something, nothing_yet, end };

constexpr std::size_t piece_bytes = 65536;

// Appends the bytes that have arrived, at most so many. RunError with the system's text.
Received receive_some(const Socket& socket, Bytestring& incoming, std::size_t most = piece_bytes) {
  std::array<std::byte, piece_bytes> piece;
  const ssize_t count = ::recv(socket.get(), piece.data(), std::min(most, piece.size()), MSG_DONTWAIT);
  if (count > 0) {
    incoming.insert(incoming.end(), piece.begin(), piece.begin() + count);
    return Received::something;
  }
  if (count == 0) return Received::end;
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return Received::nothing_yet;
  throw RunError(std::strerror(errno));
}

class TcpRendezvous final : public Rendezvous {
 public:
  TcpRendezvous(const TcpPlace& place, std::chrono::milliseconds patience);
  ~TcpRendezvous() override;

  int process() const override { return place_.process; }
  int processes() const override { return place_.processes; }
  int local_process() const override { return place_.local_process; }
  int local_processes() const override { return place_.local_processes; }
  std::vector<Bytestring> all_gather(std::span<const std::byte> own) override;
  void check() override;
  void fail(const std::string& text) noexcept override;
  std::vector<Heard> beat(const Position& own) noexcept override;
  void describe_positions(const std::function<std::string(int rank, const Position&)>& describe) override {
    const std::lock_guard lock(mutex_);
    describe_ = describe;
  }
  std::unique_ptr<Communicator> make_communicator(const std::vector<CommunicationGroup>& groups,
                                                  int channels) override {
    // An address under which the others reach this process: that of process 0 is known, and the
    // others' is that from which they reach process 0.
    const bool known = place_.process == 0 || is_loopback(place_.address);
    const std::string address = known ? place_.address : own_address(peers_.front().socket);
    return make_tcp_communicator(*this, address, place_.silence, groups, channels);
  }

 private:
  // A connection, and the data that came through it.
  struct Peer {
    int process = 0;
    Socket socket;
    std::unique_ptr<std::timed_mutex> sending = std::make_unique<std::timed_mutex>();
    Bytestring incoming;
    std::int64_t signs = 0;  // of life: raised with whatever comes from it
    Position position;
    std::deque<Bytestring> arrived;  // contributions, or everyone's from process 0
    bool left = false;
    bool closed = false;
  };

  void gather_processes(std::chrono::milliseconds patience);
  void greet_process_0(std::chrono::milliseconds patience);
  std::string refusal_of(const Message& greeting) const;
  // A connection that has not said who it is.
  struct Stranger {
    Socket socket;
    Bytestring incoming;
    Clock::time_point since;
  };
  // Reads what a stranger says; false when it is one no more: it has taken its place as a peer, or
  // was refused, and `refused` says why.
  bool hear(Stranger& stranger, std::string& refused);
  // Forgets the peers who are gone, so that they may come again.
  void drop_dead_peers(std::string& refused);

  void read_until_stopped();
  void read_from(Peer& peer);
  std::string last_place(const Peer& peer) const;
  void take(Peer& peer, Message message);
  void send_to(Peer& peer, const Bytestring& frame);
  void throw_failure();  // with mutex_ held

  TcpPlace place_;
  std::uint64_t token_ = 0;  // fingerprints
  std::uint64_t build_ = 0;
  std::vector<Peer> peers_;  // all others by process, or process 0 alone
  Socket wake_reader_;
  std::thread reader_;

  std::mutex telling_;  // held while a failure is sent: a leaving process says farewell after that
  std::mutex mutex_;    // guards the members below and the peers' state
  std::condition_variable changed_;
  std::optional<std::string> failure_;
  std::function<std::string(int rank, const Position&)> describe_;
  bool waiting_ = false;  // all_gather is being called here
  bool leaving_ = false;  // before this process says farewell
  bool stopped_ = false;
};

TcpRendezvous::TcpRendezvous(const TcpPlace& place, std::chrono::milliseconds patience)
    : place_(place),
      token_(fingerprint(place.token)),
      build_(fingerprint(place.build)),
      wake_reader_(eventfd(0, EFD_CLOEXEC)) {
  PARPLAN_ASSERT(place.process >= 0 && place.process < place.processes,
                 fmt::format("process {} of {}", place.process, place.processes));
  if (!wake_reader_) throw RunError(fmt::format("eventfd: {}", std::strerror(errno)));
  if (place.process == 0)
    gather_processes(patience);
  else
    greet_process_0(patience);
  try {
    reader_ = std::thread([this] { read_until_stopped(); });
  } catch (const std::system_error& error) {
    throw RunError(fmt::format("process {}: the thread that hears the other processes cannot be created: {}",
                               place.process, error.code().message()));
  }
}

std::string TcpRendezvous::refusal_of(const Message& greeting) const {
  if (greeting.kind != MessageKind::greeting || greeting.body.size() != greeting_bytes - head_bytes)
    return "it does not speak this version of parplan's protocol";
  const std::uint64_t place = number_at(greeting.body.data());
  const std::uint64_t process = place & 0xffffffffu;
  const std::uint64_t processes = place >> 32;
  if (number_at(greeting.body.data() + 8) != token_)
    return "it has another token: it belongs to another job (PARPLAN_JOB_TOKEN is the same in all processes of a job)";
  if (processes != static_cast<std::uint64_t>(place_.processes))
    return fmt::format("it is one of {} processes, this job has {}", processes, place_.processes);
  if (process < 1 || process >= processes) return fmt::format("it calls itself process {} of {}", process, processes);
  if (number_at(greeting.body.data() + 16) != build_)
    return fmt::format("process {} is another build of parplan than process 0", process);
  if (peers_[process - 1].socket) return fmt::format("there is a process {} already", process);
  return {};
}

bool TcpRendezvous::hear(Stranger& stranger, std::string& refused) {
  std::string refusal;
  try {
    const Received received =
        receive_some(stranger.socket, stranger.incoming, greeting_bytes - stranger.incoming.size());
    const std::optional<Message> greeting = take_message(stranger.incoming);
    if (!greeting && received != Received::end && stranger.incoming.size() < greeting_bytes) return true;
    refusal = greeting                          ? refusal_of(*greeting)
              : received == Received::end ? "it closed the connection"
                                          : "it does not speak this version of parplan's protocol";
    if (refusal.empty()) {
      peers_[(number_at(greeting->body.data()) & 0xffffffffu) - 1].socket = std::move(stranger.socket);
      return false;
    }
  } catch (const RunError& error) {
    refusal = error.what();
  }
  refused = fmt::format(" (a connection was refused: {})", refusal);
  send_all(stranger.socket, framed(MessageKind::refusal, refusal), std::chrono::milliseconds(0));
  return false;
}

// A peer says nothing between its greeting and the welcome: what can be read is its end.
void TcpRendezvous::drop_dead_peers(std::string& refused) {
  for (Peer& peer : peers_) {
    pollfd ready{.fd = peer.socket.get(), .events = POLLIN, .revents = 0};
    if (!peer.socket || poll(&ready, 1, 0) <= 0) continue;
    peer.socket = Socket();
    refused = fmt::format(" (process {} came, and was lost)", peer.process);
  }
}

void TcpRendezvous::gather_processes(std::chrono::milliseconds patience) {
  for (int process = 1; process < place_.processes; ++process) {
    peers_.emplace_back();
    peers_.back().process = process;
  }
  const auto deadline = Clock::now() + patience;
  const Socket listener = listen_at(place_.address, place_.port);
  std::vector<Stranger> strangers;  // oldest first
  std::string refused;
  Clock::time_point accepts_from = Clock::now();
  const auto is_missing = [](const Peer& peer) { return !peer.socket; };

  while (std::any_of(peers_.begin(), peers_.end(), is_missing)) {
    const auto now = Clock::now();
    if (now >= deadline) {
      std::vector<int> missing;
      for (const Peer& peer : peers_)
        if (!peer.socket) missing.push_back(peer.process);
      const std::string text =
          fmt::format("waited {} at {} for {} processes; missing: {}{}", shown(patience),
                      address_text(place_.address, place_.port), place_.processes, fmt::join(missing, ", "), refused);
      for (const Peer& peer : peers_)
        if (peer.socket) send_all(peer.socket, framed(MessageKind::failure, text), last_word_patience);
      throw RunError(text);
    }
    std::erase_if(strangers, [&](const Stranger& stranger) { return now - stranger.since > stranger_patience; });
    if (strangers.size() >= most_strangers && now - strangers.front().since > least_stranger_patience)
      strangers.erase(strangers.begin());
    const bool accepts = strangers.size() < most_strangers && now >= accepts_from;
    std::vector<pollfd> ready = {
        {.fd = accepts ? listener.get() : -1, .events = POLLIN, .revents = 0}};  // poll skips -1
    for (const Stranger& stranger : strangers)
      ready.push_back({.fd = stranger.socket.get(), .events = POLLIN, .revents = 0});
    for (const Peer& peer : peers_) ready.push_back({.fd = peer.socket.get(), .events = POLLIN, .revents = 0});
    // Without a listener, or with strangers that may grow too old, it looks again soon.
    const int limit = milliseconds_until(deadline);
    const bool soon = !accepts || !strangers.empty();
    if (poll(ready.data(), ready.size(), soon ? std::min(limit, static_cast<int>(accept_pause.count())) : limit) <= 0)
      continue;

    std::vector<Stranger> remaining;
    for (std::size_t s = 0; s < strangers.size(); ++s)
      if (ready[s + 1].revents == 0 || hear(strangers[s], refused)) remaining.push_back(std::move(strangers[s]));
    strangers = std::move(remaining);
    drop_dead_peers(refused);
    if (ready[0].revents == 0) continue;
    Socket accepted(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (accepted) {
      prepare_connection(accepted, place_.silence);
      strangers.push_back({.socket = std::move(accepted), .incoming = {}, .since = Clock::now()});
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      // The connection stays in the queue, and the listener ready.
      refused = fmt::format(" (a connection cannot be accepted: {})", std::strerror(errno));
      accepts_from = Clock::now() + accept_pause;
    }
  }
  for (const Peer& peer : peers_) send_all(peer.socket, framed(MessageKind::welcome, Bytestring()));
}

void TcpRendezvous::greet_process_0(std::chrono::milliseconds patience) {
  const std::string where = address_text(place_.address, place_.port);
  auto deadline = Clock::now() + patience;
  std::string failure;
  Socket socket;
  while (!(socket = connect_once(place_.address, place_.port, deadline, failure))) {
    if (Clock::now() >= deadline)
      throw RunError(fmt::format("process {} did not reach process 0 at {} within {}: {}", place_.process, where,
                                 shown(patience), failure));
    std::this_thread::sleep_for(retry_pause);
  }
  prepare_connection(socket, place_.silence);
  Bytestring greeting;
  append(greeting, static_cast<std::uint64_t>(place_.processes) << 32 | static_cast<std::uint64_t>(place_.process));
  append(greeting, token_);
  append(greeting, build_);
  send_all(socket, framed(MessageKind::greeting, greeting));

  deadline = Clock::now() + patience + std::min(welcome_margin, patience / welcome_margin_part);
  Bytestring incoming;
  const auto refuse = [&](const std::string& why) {
    throw RunError(fmt::format(
        "process {}: what listens at {} is no process 0 of this job: {} (MASTER_PORT may name another port)",
        place_.process, where, why));
  };
  while (true) {
    pollfd ready{.fd = socket.get(), .events = POLLIN, .revents = 0};
    poll(&ready, 1, milliseconds_until(deadline));
    if (Clock::now() >= deadline) refuse("it does not answer");
    std::optional<Message> message;
    try {
      const Received received = receive_some(socket, incoming);
      message = take_message(incoming, longest_refusal);
      if (!message && received == Received::end) throw RunError("it closed the connection");
    } catch (const RunError& error) {
      refuse(error.what());
    }
    if (!message) continue;
    if (message->kind == MessageKind::welcome) break;
    if (message->kind == MessageKind::failure) throw RunError(printable(text_of(message->body)));
    if (message->kind != MessageKind::refusal) refuse("it does not speak this version of parplan's protocol");
    throw RunError(
        fmt::format("process 0 at {} refuses process {}: {}", where, place_.process,
                    printable(text_of(message->body))));
  }
  peers_.emplace_back();
  peers_.back().socket = std::move(socket);
  peers_.back().incoming = std::move(incoming);
}

// Leaves in order: the others receive what was sent before, then see the end. Bytes that arrive at
// a closed socket would make the system drop data in flight, hence the wait.
TcpRendezvous::~TcpRendezvous() {
  { const std::lock_guard told(telling_); }
  {
    const std::lock_guard lock(mutex_);
    leaving_ = true;
  }
  for (Peer& peer : peers_) {
    const std::lock_guard sending(*peer.sending);
    send_all(peer.socket, framed(MessageKind::farewell, Bytestring()), last_word_patience);
    shutdown(peer.socket.get(), SHUT_WR);
  }
  {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, farewell_patience, [&] {
      return std::all_of(peers_.begin(), peers_.end(), [](const Peer& p) { return p.closed; });
    });
    stopped_ = true;
  }
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_reader_.get(), &one, sizeof one);
  reader_.join();
}

void TcpRendezvous::read_until_stopped() {
  for (Peer& peer : peers_) read_from(peer);  // messages that came together with the welcome
  while (true) {
    std::vector<pollfd> ready = {{.fd = wake_reader_.get(), .events = POLLIN, .revents = 0}};
    std::vector<Peer*> open;
    {
      const std::lock_guard lock(mutex_);
      if (stopped_) return;
      for (Peer& peer : peers_)
        if (!peer.closed) open.push_back(&peer);
    }
    for (const Peer* peer : open) ready.push_back({.fd = peer->socket.get(), .events = POLLIN, .revents = 0});
    if (poll(ready.data(), ready.size(), -1) <= 0) continue;
    for (std::size_t p = 0; p < open.size(); ++p)
      if (ready[p + 1].revents != 0) read_from(*open[p]);
  }
}

void TcpRendezvous::read_from(Peer& peer) {
  std::string loss = "its connection closed";
  try {
    const Received received = receive_some(peer.socket, peer.incoming);
    if (received == Received::something) {
      const std::lock_guard lock(mutex_);
      ++peer.signs;
    }
    while (std::optional<Message> message = take_message(peer.incoming)) take(peer, std::move(*message));
    if (received != Received::end) return;
  } catch (const std::exception& error) {  // out of memory, too: nobody else catches it here
    loss = error.what();
  }
  shutdown(peer.socket.get(), SHUT_RDWR);
  bool left = false;
  {
    const std::lock_guard lock(mutex_);
    peer.closed = true;
    // Whoever sees this process leave closes the connection, and says farewell to nobody.
    left = peer.left || leaving_;
    if (!left) loss += last_place(peer);
  }
  if (!left) fail(fmt::format("process {} was lost: {}", peer.process, loss));
  changed_.notify_all();
}

// With mutex_ held.
std::string TcpRendezvous::last_place(const Peer& peer) const {
  if (!describe_ || peer.position.step < 0) return "";
  try {
    return fmt::format("; it was last in {}", describe_(peer.process, peer.position));
  } catch (const std::bad_alloc&) {
    return "";  // that it was lost matters more
  }
}

void TcpRendezvous::take(Peer& peer, Message message) {
  if (message.kind == MessageKind::failure) {
    fail(printable(text_of(message.body)));
    return;
  }
  if (message.kind == MessageKind::beat) {
    if (message.body.size() != 40) return;
    const std::byte* body = message.body.data();
    const auto number = [&](std::size_t i) { return static_cast<std::int64_t>(number_at(body + 8 * i)); };
    const std::lock_guard lock(mutex_);
    peer.position = {.step = number(0),
                     .call = static_cast<std::int32_t>(number(1)),
                     .instruction = static_cast<std::int32_t>(number(2)),
                     .waits = number(3) != 0,
                     .moves = number(4)};
    return;
  }
  std::string in_vain;
  {
    const std::lock_guard lock(mutex_);
    if (message.kind == MessageKind::contribution || message.kind == MessageKind::everyone)
      peer.arrived.push_back(std::move(message.body));
    if (message.kind == MessageKind::farewell) peer.left = true;
    // A process that waits for one that left without contributing waits in vain, and so do all
    // others.
    const bool someone_waits =
        waiting_ || std::any_of(peers_.begin(), peers_.end(), [](const Peer& p) { return !p.arrived.empty(); });
    for (const Peer& p : peers_)
      if (someone_waits && p.left && p.arrived.empty()) in_vain = fmt::format("process {} has ended", p.process);
  }
  if (!in_vain.empty()) fail(in_vain);
  changed_.notify_all();
}

// Records why the job has ended, once, and tells the others. Where another thread is sending to one
// that takes nothing, the connection ends.
void TcpRendezvous::fail(const std::string& text) noexcept {
  const std::lock_guard telling(telling_);
  try {
    {
      const std::lock_guard lock(mutex_);
      if (failure_) return;
      failure_ = text;
    }
    changed_.notify_all();
    const Bytestring frame = framed(MessageKind::failure, text);
    for (Peer& peer : peers_) {
      const std::unique_lock sending(*peer.sending, last_word_patience);
      // Processes that are gone need not hear it.
      if (!sending.owns_lock() || send_all(peer.socket, frame, last_word_patience) == ETIMEDOUT)
        shutdown(peer.socket.get(), SHUT_RDWR);
    }
  } catch (const std::exception&) {
    // No memory: the ends of the connections have to say it.
    for (Peer& peer : peers_) shutdown(peer.socket.get(), SHUT_RDWR);
  }
}

std::vector<Heard> TcpRendezvous::beat(const Position& own) noexcept {
  std::vector<Heard> heard;
  try {
    Bytestring body;
    for (const std::int64_t number : {own.step, std::int64_t{own.call}, std::int64_t{own.instruction},
                                      std::int64_t{own.waits ? 1 : 0}, own.moves})
      append(body, static_cast<std::uint64_t>(number));
    const Bytestring frame = framed(MessageKind::beat, body);
    for (Peer& peer : peers_) {
      {
        const std::lock_guard lock(mutex_);
        if (peer.left || peer.closed) continue;
        heard.push_back({.process = peer.process, .signs = peer.signs, .position = peer.position});
      }
      // Whatever is being sent is a sign of life, too. A socket that takes more takes a beat whole.
      if (const std::unique_lock sending(*peer.sending, std::try_to_lock); sending.owns_lock())
        if (takes_more(peer.socket)) send_all(peer.socket, frame, last_word_patience);
    }
  } catch (const std::exception&) {
    // No memory: the others hear nothing of this process for a moment.
  }
  return heard;
}

void TcpRendezvous::send_to(Peer& peer, const Bytestring& frame) {
  int error = 0;
  {
    const std::lock_guard sending(*peer.sending);
    error = send_all(peer.socket, frame);
  }
  if (error == 0) return;
  {
    // The reader may be about to learn the reason.
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, farewell_patience, [&] { return failure_.has_value() || peer.left; });
    throw_failure();
    if (peer.left) error = 0;
  }
  fail(error == 0 ? fmt::format("process {} has ended", peer.process)
                  : fmt::format("process {} was lost: {}", peer.process, std::strerror(error)));
  check();
}

void TcpRendezvous::throw_failure() {
  if (failure_) throw RunError(*failure_);
}

void TcpRendezvous::check() {
  const std::lock_guard lock(mutex_);
  throw_failure();
}

std::vector<Bytestring> TcpRendezvous::all_gather(std::span<const std::byte> own) {
  check();
  if (place_.process != 0) send_to(peers_.front(), framed(MessageKind::contribution, own));
  std::vector<Bytestring> all;
  std::string in_vain;
  {
    std::unique_lock lock(mutex_);
    waiting_ = true;
    const auto has_arrived = [](const Peer& peer) { return !peer.arrived.empty(); };
    const auto is_vain = [](const Peer& peer) { return peer.left && peer.arrived.empty(); };
    changed_.wait(lock, [&] {
      return failure_ || std::all_of(peers_.begin(), peers_.end(), has_arrived) ||
             std::any_of(peers_.begin(), peers_.end(), is_vain);
    });
    waiting_ = false;
    throw_failure();
    for (Peer& peer : peers_) {
      if (is_vain(peer)) {
        in_vain = fmt::format("process {} has ended", peer.process);
        break;
      }
      all.push_back(std::move(peer.arrived.front()));
      peer.arrived.pop_front();
    }
  }
  if (!in_vain.empty()) {
    fail(in_vain);
    check();
  }
  if (place_.process == 0) {
    all.insert(all.begin(), Bytestring(own.begin(), own.end()));
    Bytestring body;
    for (const Bytestring& one : all) append(body, one.size());
    for (const Bytestring& one : all) body.insert(body.end(), one.begin(), one.end());
    const Bytestring frame = framed(MessageKind::everyone, body);
    for (Peer& peer : peers_) send_to(peer, frame);
    return all;
  }
  const Bytestring body = std::move(all.front());
  all.clear();
  const std::size_t lengths = static_cast<std::size_t>(place_.processes) * 8;
  std::size_t at = lengths;
  for (int process = 0; process < place_.processes && body.size() >= lengths; ++process) {
    const std::uint64_t length = number_at(body.data() + static_cast<std::size_t>(process) * 8);
    if (length > body.size() - at) break;
    all.emplace_back(body.begin() + static_cast<std::ptrdiff_t>(at),
                     body.begin() + static_cast<std::ptrdiff_t>(at + length));
    at += length;
  }
  PARPLAN_ASSERT(all.size() == static_cast<std::size_t>(place_.processes) && at == body.size(),
                 fmt::format("{} of {} contributions in {} bytes", all.size(), place_.processes, body.size()));
  return all;
}

}  // namespace

std::unique_ptr<Rendezvous> tcp_rendezvous(const TcpPlace& place, std::chrono::milliseconds patience) {
  return std::make_unique<TcpRendezvous>(place, patience);
}

}  // namespace parplan
