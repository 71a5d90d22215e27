#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "planner/program/verify_passes.h"

namespace parplan {
namespace {


std::size_t at(int index) { return static_cast<std::size_t>(index); }

// One launch of a collective, send or receive.
struct Launch {
  int rank = 0;
  int call = 0;
  int index = 0;  // of the instruction
  const Program* program = nullptr;
  const Instruction* instruction = nullptr;
  int meeting = -1;

  const std::vector<int>& ranks() const { return program->group(instruction->group); }
  // A master's gather or scatter counts by one rank's part.
  std::int64_t bytes() const {
    const bool in_parts = instruction->kind == InstructionKind::gather || instruction->kind == InstructionKind::scatter;
    return in_parts ? instruction->operands.front().bytes : instruction->operands.back().bytes;
  }
};

// The launches that wait for each other: one of each member of a group, or a send and its receive.
struct Meeting {
  std::vector<int> launches;
  int previous = -1;  // the meeting before it on the same communicator or channel
  int next = -1;
};

std::string numbered(const char* what, int count) { return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s"); }

class CommunicationCheck {
 public:
  CommunicationCheck(std::span<const Program> programs, std::vector<Fault>& faults)
      : programs_(programs), faults_(faults) {}

  void run() {
    const std::size_t before = faults_.size();
    collect();
    match_collectives();
    match_transfers();
    if (faults_.size() == before) play_in_launch_order();
    if (faults_.size() == before) play_streams();
  }

 private:
  void fault(const Launch& launch, const std::string& what) {
    faults_.push_back({launch.rank, launch.call, launch.index, what});
  }

  // "all_reduce_sum 'loss' of 4 B (fp32) over its data group (0, 1) in call 7"
  std::string describe_launch(const Launch& launch) const {
    const Instruction& instruction = *launch.instruction;
    const char* link = instruction.kind == InstructionKind::send      ? "to its"
                       : instruction.kind == InstructionKind::receive ? "from its"
                                                                      : "over its";
    return fmt::format("{} of {} B ({}) {} {} group ({}) in call {}", describe(instruction), launch.bytes(),
                       name(instruction.type), link, name(instruction.group), list_ranks(launch.ranks()), launch.call);
  }

  static bool is_transfer(const Instruction& instruction) {
    return instruction.kind == InstructionKind::send || instruction.kind == InstructionKind::receive;
  }

  // Matching: who meets whom ----------------------------------------------------------------------

  void collect() {
    for (const Program& program : programs_) {
      std::vector<std::vector<int>>& of_rank = launch_of_.emplace_back();
      for (std::size_t c = 0; c < program.calls.size(); ++c) {
        const Segment& segment = program.segments[at(program.calls[c].segment)];
        std::vector<int>& of_call = of_rank.emplace_back(segment.instructions.size(), -1);
        for (std::size_t i = 0; i < segment.instructions.size(); ++i) {
          const Instruction& instruction = segment.instructions[i];
          if (!communicates(instruction.kind)) continue;
          if (!is_transfer(instruction) && program.group(instruction.group).size() < 2) continue;
          of_call[i] = static_cast<int>(launches_.size());
          launches_.push_back({program.rank, static_cast<int>(c), static_cast<int>(i), &program, &instruction, -1});
        }
      }
    }
  }

  void meet(std::vector<int> launches, int& previous) {
    const int meeting = static_cast<int>(meetings_.size());
    for (int launch : launches) launches_[at(launch)].meeting = meeting;
    meetings_.push_back({std::move(launches), previous, -1});
    if (previous >= 0) meetings_[at(previous)].next = meeting;
    previous = meeting;
  }

  // Ranks that share a communicator launch the same collectives in it, in the same order. Groups of
  // equal ranks share one communicator.
  void match_collectives() {
    std::map<std::vector<int>, std::vector<std::vector<int>>> communicators;  // per member: its launches
    for (std::size_t l = 0; l < launches_.size(); ++l) {
      const Launch& launch = launches_[l];
      if (is_transfer(*launch.instruction)) continue;
      const std::vector<int>& ranks = launch.ranks();
      std::vector<std::vector<int>>& members = communicators[ranks];
      members.resize(ranks.size());
      members[at(static_cast<int>(std::find(ranks.begin(), ranks.end(), launch.rank) - ranks.begin()))].push_back(
          static_cast<int>(l));
    }
    for (const auto& [ranks, members] : communicators) {
      std::size_t most = 0;
      for (const std::vector<int>& member : members) most = std::max(most, member.size());
      int previous = -1;
      for (std::size_t n = 0; n < most; ++n)
        if (!match_nth(ranks, members, n, previous)) break;
    }
  }

  bool match_nth(const std::vector<int>& ranks, const std::vector<std::vector<int>>& members, std::size_t n,
                 int& previous) {
    const auto launcher =
        std::find_if(members.begin(), members.end(), [&](const std::vector<int>& m) { return n < m.size(); });
    const Launch& first = launches_[at((*launcher)[n])];
    std::vector<int> together;
    for (std::size_t m = 0; m < members.size(); ++m) {
      if (n >= members[m].size()) {
        fault(first,
              fmt::format("a collective that not all join: rank {} launches {}, rank {} launches only {} in that group",
                          first.rank, describe_launch(first), ranks[m],
                          numbered("collective", static_cast<int>(members[m].size()))));
        return false;
      }
      const Launch& other = launches_[at(members[m][n])];
      const Instruction& a = *first.instruction;
      const Instruction& b = *other.instruction;
      if (a.kind != b.kind || a.type != b.type || first.bytes() != other.bytes() || a.group != b.group) {
        fault(first,
              fmt::format("{}: rank {} launches {} where rank {} launches {}",
                          a.group != b.group ? "two groups launched in crossed order" : "collectives that do not match",
                          first.rank, describe_launch(first), other.rank, describe_launch(other)));
        return false;
      }
      together.push_back(members[m][n]);
    }
    meet(std::move(together), previous);
    return true;
  }

  // The n-th send of a channel meets its n-th receive. Two ranks have a channel for each axis along
  // which they are neighbours, and for each direction.
  void match_transfers() {
    struct Channel {
      std::vector<int> sends, receives;
    };
    std::map<std::tuple<int, int, GroupKey>, Channel> channels;  // source, destination, and what it is to the source
    for (std::size_t l = 0; l < launches_.size(); ++l) {
      const Launch& launch = launches_[l];
      if (!is_transfer(*launch.instruction)) continue;
      const GroupKey group = launch.instruction->group;
      const int peer = launch.ranks().front();
      if (launch.instruction->kind == InstructionKind::send) {
        channels[{launch.rank, peer, group}].sends.push_back(static_cast<int>(l));
      } else {
        channels[{peer, launch.rank, seen_from(group)}].receives.push_back(static_cast<int>(l));
      }
    }
    for (const auto& [ends, channel] : channels) {
      const auto& [source, destination, direction] = ends;
      const std::size_t pairs = std::min(channel.sends.size(), channel.receives.size());
      int previous = -1;
      bool matches = true;
      for (std::size_t n = 0; n < pairs && matches; ++n) {
        const Launch& send = launches_[at(channel.sends[n])];
        const Launch& receive = launches_[at(channel.receives[n])];
        matches = send.bytes() == receive.bytes() && send.instruction->type == receive.instruction->type;
        if (matches) {
          meet({channel.sends[n], channel.receives[n]}, previous);
        } else {
          fault(send,
                fmt::format("a send and a receive that do not match: rank {} launches {} where rank {} launches {}",
                            source, describe_launch(send), destination, describe_launch(receive)));
        }
      }
      if (!matches) continue;
      if (channel.sends.size() > pairs) {
        const Launch& send = launches_[at(channel.sends[pairs])];
        fault(send,
              fmt::format("a send without its receive: rank {} launches {}, rank {} launches only {} from it", source,
                          describe_launch(send), destination, numbered("receive", static_cast<int>(pairs))));
      }
      if (channel.receives.size() > pairs) {
        const Launch& receive = launches_[at(channel.receives[pairs])];
        fault(receive,
              fmt::format("a receive without its send: rank {} launches {}, rank {} launches only {} to it",
                          destination, describe_launch(receive), source, numbered("send", static_cast<int>(pairs))));
      }
    }
  }

  // Launch order: how the CPU runtime runs --------------------------------------------------------

  // A rank joins a collective or a receive, posts a send and continues, or waits until a send was
  // received: where a stream waits for an event of one that sent before, and where a call ends, for
  // those of its side streams. The sends of one line (to a rank, in a group) are done in order.
  enum class Act { join, post, await };
  struct Move {
    Act act{};
    int launch = 0;
  };
  using Sends = std::vector<int>;  // the last one on each line

  std::vector<Move> moves_of(const Program& program) const {
    std::vector<Move> moves;
    std::array<Sends, stream_count> sent{};
    std::vector<Sends> before(at(program.events));  // per event
    const auto await = [&](const Sends& sends) {
      for (int send : sends) moves.push_back({Act::await, send});
    };
    for (std::size_t c = 0; c < program.calls.size(); ++c) {
      const Call& call = program.calls[c];
      const Segment& segment = program.segments[at(call.segment)];
      const Sends& own = sent[index_of(segment.stream)];
      for (int event : call.waits) await(before[at(event)]);
      std::array<bool, stream_count> side{};
      for (const Instruction& instruction : segment.instructions) side[index_of(instruction.stream)] = true;
      side[index_of(segment.stream)] = false;
      if (std::ranges::find(side, true) != side.end()) await(own);
      std::vector<Sends> recorded(at(segment.events));
      for (std::size_t i = 0; i < segment.instructions.size(); ++i) {
        const Instruction& instruction = segment.instructions[i];
        Sends& of_stream = sent[index_of(instruction.stream)];
        for (int event : instruction.waits) await(recorded[at(event)]);
        if (const int launch = launch_of_[at(program.rank)][c][i]; launch >= 0) {
          const bool send = instruction.kind == InstructionKind::send;
          moves.push_back({send ? Act::post : Act::join, launch});
          if (send) {
            std::erase_if(of_stream,
                          [&](int earlier) { return launches_[at(earlier)].instruction->group == instruction.group; });
            of_stream.push_back(launch);
          }
        }
        if (instruction.records) recorded[at(*instruction.records)] = of_stream;
      }
      for (std::size_t s = 0; s < stream_count; ++s)
        if (side[s]) await(sent[s]);
      if (call.records) before[at(*call.records)] = own;
    }
    return moves;
  }

  void play_in_launch_order() {
    std::vector<std::vector<Move>> moves;
    for (const Program& program : programs_) moves.push_back(moves_of(program));
    std::vector<std::size_t> position(programs_.size(), 0);
    std::vector<bool> arrived(launches_.size(), false);
    std::vector<bool> complete(meetings_.size(), false);
    std::deque<int> ready;
    for (std::size_t r = 0; r < programs_.size(); ++r) ready.push_back(static_cast<int>(r));
    const auto arrive = [&](int launch) {
      if (arrived[at(launch)]) return;
      arrived[at(launch)] = true;
      const int m = launches_[at(launch)].meeting;
      const Meeting& meeting = meetings_[at(m)];
      if (!std::all_of(meeting.launches.begin(), meeting.launches.end(), [&](int l) { return arrived[at(l)]; })) return;
      complete[at(m)] = true;
      for (int l : meeting.launches) ready.push_back(launches_[at(l)].rank);
    };
    while (!ready.empty()) {
      const int rank = ready.front();
      ready.pop_front();
      std::size_t& next = position[at(rank)];
      for (; next < moves[at(rank)].size(); ++next) {
        const Move& move = moves[at(rank)][next];
        if (move.act != Act::await) arrive(move.launch);
        if (move.act != Act::post && !complete[at(launches_[at(move.launch)].meeting)]) break;
      }
    }

    // The lowest rank that is stuck, and from each one to a rank that it waits for, which is stuck
    // too.
    const auto stuck = [&](int rank) { return position[at(rank)] < moves[at(rank)].size(); };
    int rank = 0;
    while (rank < static_cast<int>(programs_.size()) && !stuck(rank)) ++rank;
    if (rank == static_cast<int>(programs_.size())) return;
    std::vector<int> chain;
    while (std::find(chain.begin(), chain.end(), rank) == chain.end()) {
      chain.push_back(rank);
      const Launch& held = launches_[at(moves[at(rank)][position[at(rank)]].launch)];
      for (int l : meetings_[at(held.meeting)].launches)
        if (!arrived[at(l)]) {
          rank = launches_[at(l)].rank;
          break;
        }
    }
    chain.erase(chain.begin(), std::find(chain.begin(), chain.end(), rank));
    bool collectives = true;
    std::string circle;
    for (std::size_t k = 0; k < chain.size(); ++k) {
      const Move& move = moves[at(chain[k])][position[at(chain[k])]];
      const Launch& held = launches_[at(move.launch)];
      collectives = collectives && !is_transfer(*held.instruction);
      circle += fmt::format("{}rank {} waits {} {} for rank {}", k == 0 ? "" : "; ", chain[k],
                            move.act == Act::await ? "for the end of" : "in", describe_launch(held),
                            chain[(k + 1) % chain.size()]);
    }
    const Launch& first = launches_[at(moves[at(chain.front())][position[at(chain.front())]].launch)];
    fault(first,
          fmt::format("{}: {}", collectives ? "two groups launched in crossed order" : "deadlock in launch order",
                      circle));
  }

  // Concurrent streams under unbuffered rendezvous: how a device with a queue per stream runs -----

  enum class Step { meet, wait, record };
  struct Item {
    Step step{};
    int id = 0;  // launch, event
  };
  struct Queue {
    std::vector<Item> items;
    std::size_t position = 0;
  };

  int new_event() {
    recorders_.push_back(-1);
    return static_cast<int>(recorders_.size()) - 1;
  }
  void push_record(int queue, int event) {
    queues_[at(queue)].items.push_back({Step::record, event});
    recorders_[at(event)] = queue;
  }
  void push_wait(int queue, int event) { queues_[at(queue)].items.push_back({Step::wait, event}); }

  // Kernels are irrelevant: they always end once they begin.
  void fill_queues(const Program& program) {
    const auto queue_of = [&](Stream stream) {
      return program.rank * static_cast<int>(stream_count) + static_cast<int>(stream);
    };
    std::vector<int> events(at(program.events));
    for (int& event : events) event = new_event();
    for (std::size_t c = 0; c < program.calls.size(); ++c) {
      const Call& call = program.calls[c];
      const Segment& segment = program.segments[at(call.segment)];
      const int main = queue_of(segment.stream);
      for (int event : call.waits) push_wait(main, events[at(event)]);
      std::vector<int> sides;
      for (const Instruction& instruction : segment.instructions) {
        const int queue = queue_of(instruction.stream);
        if (queue != main && std::find(sides.begin(), sides.end(), queue) == sides.end()) sides.push_back(queue);
      }
      if (!sides.empty()) {
        const int fork = new_event();
        push_record(main, fork);
        for (int side : sides) push_wait(side, fork);
      }
      std::vector<int> inner(at(segment.events));
      for (int& event : inner) event = new_event();
      for (std::size_t i = 0; i < segment.instructions.size(); ++i) {
        const Instruction& instruction = segment.instructions[i];
        const int queue = queue_of(instruction.stream);
        for (int event : instruction.waits) push_wait(queue, inner[at(event)]);
        const int launch = launch_of_[at(program.rank)][c][i];
        if (launch >= 0) {
          queues_[at(queue)].items.push_back({Step::meet, launch});
          queue_of_launch_[at(launch)] = queue;
        }
        if (instruction.records) push_record(queue, inner[at(*instruction.records)]);
      }
      for (int side : sides) {
        const int join = new_event();
        push_record(side, join);
        push_wait(main, join);
      }
      if (call.records) push_record(main, events[at(*call.records)]);
    }
  }

  void play_streams() {
    queues_.resize(programs_.size() * stream_count);
    queue_of_launch_.assign(launches_.size(), -1);
    for (const Program& program : programs_) fill_queues(program);

    std::vector<bool> recorded(recorders_.size(), false);
    std::vector<std::vector<int>> waiting(recorders_.size());  // per event: queues
    std::vector<bool> arrived(launches_.size(), false);
    std::vector<bool> complete(meetings_.size(), false);
    std::deque<int> ready;
    for (std::size_t q = 0; q < queues_.size(); ++q) ready.push_back(static_cast<int>(q));
    // Meetings of one communicator happen one after the other, in the order of their launch.
    const auto complete_from = [&](int m) {
      for (; m >= 0; m = meetings_[at(m)].next) {
        const Meeting& meeting = meetings_[at(m)];
        if (complete[at(m)] || (meeting.previous >= 0 && !complete[at(meeting.previous)])) return;
        if (!std::all_of(meeting.launches.begin(), meeting.launches.end(), [&](int l) { return arrived[at(l)]; }))
          return;
        complete[at(m)] = true;
        for (int l : meeting.launches) ready.push_back(queue_of_launch_[at(l)]);
      }
    };
    while (!ready.empty()) {
      const int q = ready.front();
      ready.pop_front();
      Queue& queue = queues_[at(q)];
      for (; queue.position < queue.items.size(); ++queue.position) {
        const Item item = queue.items[queue.position];
        if (item.step == Step::wait) {
          if (recorded[at(item.id)]) continue;
          waiting[at(item.id)].push_back(q);
          break;
        }
        if (item.step == Step::record) {
          recorded[at(item.id)] = true;
          ready.insert(ready.end(), waiting[at(item.id)].begin(), waiting[at(item.id)].end());
          continue;
        }
        const int meeting = launches_[at(item.id)].meeting;
        if (!arrived[at(item.id)]) {
          arrived[at(item.id)] = true;
          complete_from(meeting);
        }
        if (!complete[at(meeting)]) break;
      }
    }

    // From the first stuck queue to one that it waits for, until they repeat.
    std::size_t stuck = 0;
    while (stuck < queues_.size() && queues_[stuck].position == queues_[stuck].items.size()) ++stuck;
    if (stuck == queues_.size()) return;
    std::vector<int> chain;
    int q = static_cast<int>(stuck);
    while (std::find(chain.begin(), chain.end(), q) == chain.end()) {
      chain.push_back(q);
      const Item item = queues_[at(q)].items[queues_[at(q)].position];
      if (item.step == Step::wait) {
        q = recorders_[at(item.id)];
        continue;
      }
      int meeting = launches_[at(item.id)].meeting;
      while (meetings_[at(meeting)].previous >= 0 && !complete[at(meetings_[at(meeting)].previous)])
        meeting = meetings_[at(meeting)].previous;
      for (int l : meetings_[at(meeting)].launches)
        if (!arrived[at(l)]) {
          q = queue_of_launch_[at(l)];
          break;
        }
    }
    chain.erase(chain.begin(), std::find(chain.begin(), chain.end(), q));
    const auto title = [](int queue) {
      return fmt::format("stream {} of rank {}", name(static_cast<Stream>(at(queue) % stream_count)),
                         at(queue) / stream_count);
    };
    std::string circle;
    const Launch* first = nullptr;
    for (std::size_t k = 0; k < chain.size(); ++k) {
      const Item item = queues_[at(chain[k])].items[queues_[at(chain[k])].position];
      const std::string next = title(chain[(k + 1) % chain.size()]);
      if (k > 0) circle += "; ";
      if (item.step == Step::wait) {
        circle += fmt::format("{} waits for an event of {}", title(chain[k]), next);
      } else {
        const Launch& launch = launches_[at(item.id)];
        if (!first) first = &launch;
        circle += fmt::format("{} waits in {} for {}", title(chain[k]), describe_launch(launch), next);
      }
    }
    Fault deadlock{.rank = chain.front() / static_cast<int>(stream_count), .call = {}, .instruction = {}, .what = {}};
    if (first) deadlock = {first->rank, first->call, first->index, {}};
    deadlock.what = "deadlock of concurrent streams: " + circle;
    faults_.push_back(std::move(deadlock));
  }

  std::span<const Program> programs_;
  std::vector<Fault>& faults_;
  std::vector<Launch> launches_;                            // by rank, then in launch order
  std::vector<std::vector<std::vector<int>>> launch_of_;  // per rank, call, instruction; -1 for what meets nobody
  std::vector<Meeting> meetings_;
  std::vector<Queue> queues_;      // rank * streams + stream
  std::vector<int> recorders_;     // per event: the queue that records it
  std::vector<int> queue_of_launch_;
};

}  // namespace

void find_communication_faults(std::span<const Program> programs, std::vector<Fault>& faults) {
  CommunicationCheck(programs, faults).run();
}

}  // namespace parplan
