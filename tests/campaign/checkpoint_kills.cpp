// Kills runs at random places of their checkpoints' life, or lets their disk fill up, and lets them
// go on, many times:
//   checkpoint_kills FOLDER [--trials N] [--seed N]
// FOLDER is where it works; what stays there is of trials that failed. There are N trials of each
// kind. Each trains a tiny model under a random layout with random --every and --keep, and ends in
// the middle in each life but the last:
//   - the run is killed at a random call that changes a file (kill_at_call.cpp), before, within or
//     after the call;
//   - the same, to one of several processes;
//   - its log, its results and its checkpoints lie on a file system of a random size (a tmpfs that
//     only this program sees), which grows after each life. A life has to say that there is no
//     space, and for which file.
// After each life, the whole checkpoints have to be those that were given their names and not
// removed, each good in every byte; the next life has to begin with the newest; and all lives have
// to have the losses of a run that was never killed, to the bit. Prints a table and fails where
// that does not hold.
#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "planner/base/file.h"
#include "planner/base/json.h"
#include "runtime/checkpoint/checkpoint_folder.h"
#include "runtime/checkpoint/checkpoint_reader.h"

namespace parplan {
namespace {

namespace fs = std::filesystem;

constexpr int steps = 9;

struct TrialLayout {
  std::string options;
  int ranks;
};
const std::vector<TrialLayout> layouts = {
    {"--dp 1 --tp 1 --pp 1", 1},          {"--dp 2 --tp 1 --pp 1", 2},          {"--dp 2 --tp 1 --pp 1 --zero 3", 2},
    {"--dp 1 --tp 2 --pp 1", 2},          {"--dp 1 --tp 1 --pp 2", 2},          {"--dp 2 --tp 1 --pp 2 --zero 1", 4},
    {"--dp 2 --tp 2 --pp 1 --zero 2", 4}, {"--dp 4 --tp 1 --pp 1 --zero 3", 4},
};

enum class Kind { killed, one_of_several_killed, full_disk };

int shell(const std::string& command) {
  const int status = std::system(command.c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// What a layout's run is when nobody kills it.
struct Whole {
  std::string plan;
  std::vector<double> losses = {};
};

Whole make_whole(const std::string& folder, const std::string& layout, int number) {
  Whole whole{.plan = fmt::format("{}/plan-{}.yaml", folder, number)};
  const std::string report = fmt::format("{}/whole-{}.json", folder, number);
  const std::string source = PARPLAN_SOURCE_DIR;
  if (shell(fmt::format("{} simulate {}/model.yaml --cluster {}/tests/data/clusters/cpu-8.yaml --seq-len 8 "
                        "--global-batch 8 {} --quiet -o {} --json {} > /dev/null",
                        PARPLAN_BINARY, folder, source, layout, whole.plan, report)) != 0 ||
      shell(fmt::format("{} run {} --steps {} --quiet --json {} > /dev/null", PARPLAN_BINARY, whole.plan, steps,
                        report)) != 0)
    throw RunError("cannot make the plan of " + layout);
  whole.losses = Json::parse(read_file(report)).at("loss").get<std::vector<double>>();
  return whole;
}

// One life of a training.
struct Life {
  int code = 0;
  long calls = 0;                         // that change files, where it was not killed
  int kills = 0;                          // of all lives so far
  std::string killed;                     // at which kind of call
  std::set<std::string> whole;            // checkpoints by their last name, of all lives so far
  std::set<std::string> unknown;          // those of which a process that was ended changed the name
  std::map<std::int64_t, double> losses;  // by step
};

struct Counts {
  int trials = 0, lives = 0, kills = 0, filled = 0, checked = 0;
  int lost = 0, half = 0, damaged = 0, begun_elsewhere = 0, other_losses = 0, left_over = 0, failed = 0;
  std::map<std::string, int> kills_at;
  int faults() const { return lost + half + damaged + begun_elsewhere + other_losses + left_over + failed; }
};

struct Trial {
  std::string folder;
  const Whole& whole;
  int every = 1;
  int keep = 0;
  int processes = 0;  // 0: threads of one
  int rank = 0;       // of the process that is killed

  std::string checkpoints() const { return folder + "/checkpoints"; }

  Life live(long kill_at, const std::string& how) const {
    const std::string log = folder + "/log", record = folder + ".record";  // not a file that counts
    fs::remove(log);
    Life life;
    const std::string several = processes > 0 ? fmt::format("--processes {}", processes) : "";
    life.code = shell(fmt::format(
        "timeout 100 env LD_PRELOAD={0} KILL_FOLDER={1} KILL_RECORD={2} KILL_AT={3} KILL_HOW={4} KILL_RANK={5} {6} run "
        "{7} --steps {8} --checkpoint {9} --every {10} {11} --resume --quiet --log {1}/log --json {1}/results {12} "
        "--failure-records {1}.failures > {1}.said 2>&1",
        PARPLAN_KILL_AT_CALL, folder, record, kill_at, how, processes > 0 ? fmt::format("{}", rank) : "",
        PARPLAN_BINARY, whole.plan, steps, checkpoints(), every, keep > 0 ? fmt::format("--keep {}", keep) : "",
        several));
    std::ifstream lines(record);
    for (std::string word, value; lines >> word >> value;) {
      if (word == "begins") life.unknown.insert(value);
      if (word == "whole" || word == "removed") life.unknown.erase(value);
      if (word == "whole") life.whole.insert(value);
      if (word == "removed") life.whole.erase(value);
      if (word == "calls") life.calls = std::stol(value);
      if (word != "killed") continue;
      ++life.kills;
      life.killed = value;
    }
    std::ifstream steps_of_log(log);
    for (std::string line; std::getline(steps_of_log, line);) {
      const Json step = Json::parse(line, nullptr, false);
      if (step.is_discarded()) break;  // the line in which it died
      life.losses[step.at("step").get<std::int64_t>()] = step.at("loss").get<double>();
    }
    return life;
  }

  std::vector<std::string> names() const {
    std::vector<std::string> all;
    std::error_code none;
    for (fs::directory_iterator entry(checkpoints(), none), end; !none && entry != end; entry.increment(none))
      if (entry->path().filename() != ".in-use") all.push_back(entry->path().filename().string());
    std::ranges::sort(all);
    return all;
  }

  void check(const Life& life, std::int64_t expected_first, Counts& counts) const {
    std::set<std::string> found;
    for (const std::int64_t step : complete_checkpoints(checkpoints())) {
      const std::string path = path_of_checkpoint(checkpoints(), step);
      found.insert(fs::path(path).filename().string());
      ++counts.checked;
      try {
        const std::string index = path + '/' + index_name;
        const CheckpointReader reader(path, read_index(read_file(index), index));
        for (const CheckpointFile& file : reader.index().files) check_file(path, file);
        if (reader.index().step != step || reader.index().tensors.empty()) throw ConfigError(index);
      } catch (const ConfigError& error) {
        fmt::print("  {}\n", error.what());
        ++counts.damaged;
      }
    }
    for (const std::string& name : life.whole)
      counts.lost += found.contains(name) || life.unknown.contains(name) ? 0 : 1;
    for (const std::string& name : found)
      counts.half += life.whole.contains(name) || life.unknown.contains(name) ? 0 : 1;
    if (!life.losses.empty() && life.losses.begin()->first != expected_first) ++counts.begun_elsewhere;
    for (const auto& [step, loss] : life.losses)
      if (loss != whole.losses.at(static_cast<std::size_t>(step))) ++counts.other_losses;
  }
};

std::int64_t newest(const Trial& trial) {
  const std::vector<std::int64_t> steps_done = complete_checkpoints(trial.checkpoints());
  return steps_done.empty() ? 0 : steps_done.back();
}

// A run that has to end by itself, with all steps done and nothing temporary left.
void check_end(const Trial& trial, const Life& life, Counts& counts) {
  if (life.code != 0) {
    fmt::print("  exit code {}: {}\n", life.code, read_file(trial.folder + ".said"));
    ++counts.failed;
    return;
  }
  if (newest(trial) != steps) ++counts.lost;
  counts.left_over += static_cast<int>(std::ranges::count_if(
      trial.names(), [](const std::string& name) { return name.find('.') != std::string::npos; }));
}

// `most`: the calls of a run that nobody kills; a life that makes fewer than it was to make ends by
// itself.
void kill_lives(const Trial& trial, std::uint32_t most, std::mt19937& random, Counts& counts) {
  const char* const ways[] = {"before", "within", "after"};
  const std::uint32_t lives = 1 + random() % 3;
  int kills = 0;
  for (std::uint32_t number = 0; number < lives; ++number) {
    const std::int64_t first = newest(trial);
    const Life life = trial.live(static_cast<long>(1 + random() % most), ways[random() % 3]);
    ++counts.lives;
    trial.check(life, first, counts);
    if (life.kills == kills) {
      check_end(trial, life, counts);
      continue;
    }
    kills = life.kills;
    if (life.code == 0) ++counts.failed;
    ++counts.kills;
    ++counts.kills_at[life.killed];
  }
}

// A file system of limited size in a folder; it ends with this.
class SmallDisk {
 public:
  SmallDisk(const std::string& folder, std::uintmax_t bytes) : folder_(folder), bytes_(bytes) {
    mounted_ = mount("parplan-campaign", folder.c_str(), "tmpfs", 0, options().c_str()) == 0;
  }
  ~SmallDisk() {
    if (mounted_) umount2(folder_.c_str(), MNT_DETACH);
  }
  SmallDisk(const SmallDisk&) = delete;
  SmallDisk& operator=(const SmallDisk&) = delete;
  bool is_there() const { return mounted_; }
  void grow(std::uintmax_t bytes) {
    bytes_ += bytes;
    if (mount(nullptr, folder_.c_str(), nullptr, MS_REMOUNT, options().c_str()) != 0)
      throw RunError("the disk of a trial does not grow");
  }

 private:
  std::string options() const { return fmt::format("size={}", bytes_); }
  std::string folder_;
  std::uintmax_t bytes_;
  bool mounted_ = false;
};

// What this program mounts, only it and its children see. Not everyone may mount.
bool can_mount(const std::string& folder) {
  static const bool apart = (unshare(CLONE_NEWNS) == 0 || unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0) &&
                            mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0;
  return apart && SmallDisk(folder, 1 << 16).is_there();
}

// `most`: the bytes that a run needs that has enough of them.
void fill_disks(const Trial& trial, std::uintmax_t most, std::mt19937& random, Counts& counts) {
  const auto some = [&] { return 4096 + random() % most; };
  SmallDisk disk(trial.folder, some());
  const std::uint32_t lives = 1 + random() % 3;
  for (std::uint32_t number = 0; number < lives; ++number) {
    const std::int64_t first = newest(trial);
    const Life life = trial.live(0, "after");
    ++counts.lives;
    trial.check(life, first, counts);
    const std::string said = read_file(trial.folder + ".said");
    if (life.code == 0) {
      check_end(trial, life, counts);
    } else if (life.code > 2 || said.find("No space left on device") == std::string::npos ||
               said.find('\'' + trial.folder) == std::string::npos) {
      fmt::print("  exit code {}: {}\n", life.code, said);
      ++counts.failed;
    } else {
      ++counts.filled;
    }
    disk.grow(some());
  }
  disk.grow(4 * most);
  const std::int64_t first = newest(trial);
  const Life life = trial.live(0, "after");
  ++counts.lives;
  trial.check(life, first, counts);
  check_end(trial, life, counts);
}

std::uintmax_t bytes_in(const std::string& folder) {
  std::uintmax_t bytes = 0;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(folder))
    bytes += entry.is_regular_file() ? entry.file_size() : 0;
  return bytes;
}

// What a trial's run does when nothing happens to it.
struct Undisturbed {
  long calls = 0;  // of the process that is to be killed
  std::uintmax_t bytes = 0;
};

Undisturbed live_undisturbed(const Trial& trial) {
  const long calls = trial.live(0, "after").calls;
  const Undisturbed all{.calls = std::max(calls, 1L), .bytes = bytes_in(trial.folder)};
  fs::remove_all(trial.folder);
  fs::remove(trial.folder + ".record");
  fs::create_directory(trial.folder);
  return all;
}

void run_trial(Kind kind, const Trial& trial, std::mt19937& random, Counts& counts) {
  ++counts.trials;
  const Undisturbed whole = live_undisturbed(trial);
  if (kind == Kind::full_disk) {
    fill_disks(trial, whole.bytes, random, counts);
    return;
  }
  kill_lives(trial, static_cast<std::uint32_t>(whole.calls), random, counts);
  const std::int64_t first = newest(trial);
  const Life life = trial.live(0, "after");
  ++counts.lives;
  trial.check(life, first, counts);
  check_end(trial, life, counts);
}

void print_table(const std::map<Kind, Counts>& all) {
  const std::map<Kind, std::string> names = {{Kind::killed, "killed"},
                                             {Kind::one_of_several_killed, "one of several processes killed"},
                                             {Kind::full_disk, "disk full"}};
  std::string head = "| |", line = "|---|";
  for (const auto& [kind, counts] : all) {
    head += fmt::format(" {} |", names.at(kind));
    line += "---|";
  }
  fmt::print("{}\n{}\n", head, line);
  const auto row = [&](const std::string& what, const auto& count_of) {
    std::string text = fmt::format("| {} |", what);
    for (const auto& [kind, counts] : all) text += fmt::format(" {} |", count_of(counts));
    fmt::print("{}\n", text);
  };
  row("trials", [](const Counts& c) { return c.trials; });
  row("lives", [](const Counts& c) { return c.lives; });
  row("lives that were killed", [](const Counts& c) { return c.kills; });
  std::set<std::string> calls;
  for (const auto& [kind, counts] : all)
    for (const auto& [call, count] : counts.kills_at) calls.insert(call);
  for (const std::string& call : calls)
    row(fmt::format("of these at `{}`", call), [&](const Counts& c) {
      const auto found = c.kills_at.find(call);
      return found == c.kills_at.end() ? 0 : found->second;
    });
  row("lives that found no space and said so", [](const Counts& c) { return c.filled; });
  row("whole checkpoints read to the last byte", [](const Counts& c) { return c.checked; });
  row("complete checkpoints lost", [](const Counts& c) { return c.lost; });
  row("half ones taken for whole", [](const Counts& c) { return c.half; });
  row("whole ones that were damaged", [](const Counts& c) { return c.damaged; });
  row("lives that did not begin with the newest", [](const Counts& c) { return c.begun_elsewhere; });
  row("steps with another loss than in an undisturbed run", [](const Counts& c) { return c.other_losses; });
  row("temporary folders left at the end", [](const Counts& c) { return c.left_over; });
  row("lives that failed otherwise", [](const Counts& c) { return c.failed; });
}

int run_campaign(const std::string& folder_of_all, int trials, std::uint32_t seed) {
  const std::string root = fs::absolute(fmt::format("{}/checkpoint-kills-{}", folder_of_all, seed)).string();
  fs::remove_all(root);
  fs::create_directories(root);
  std::string model = read_file(std::string(PARPLAN_SOURCE_DIR) + "/tests/data/models/tiny-gpt2.yaml");
  const std::size_t begin = model.find("vocabulary: ");
  model.replace(begin, model.find('\n', begin) - begin, "vocabulary: 256");
  write_file_atomically(root + "/model.yaml", model);
  std::mt19937 random(seed);
  std::map<std::size_t, Whole> wholes;
  std::map<Kind, Counts> all;
  for (const Kind kind : {Kind::killed, Kind::one_of_several_killed, Kind::full_disk}) {
    if (kind == Kind::full_disk && !can_mount(root)) {
      fmt::print("full disks are not tried: no file system of a limited size can be mounted here\n");
      continue;
    }
    Counts& counts = all[kind];
    for (int number = 0; number < trials; ++number) {
      const bool several = kind == Kind::one_of_several_killed;
      const std::size_t layout = several ? 1 + random() % (layouts.size() - 1) : random() % layouts.size();
      if (!wholes.contains(layout))
        wholes[layout] = make_whole(root, layouts[layout].options, static_cast<int>(layout));
      const std::string folder = fmt::format("{}/trial-{}-{}", root, static_cast<int>(kind), number);
      fs::create_directory(folder);
      fs::create_directory(folder + ".failures");
      const Trial trial{.folder = folder,
                        .whole = wholes[layout],
                        .every = static_cast<int>(1 + random() % 3),
                        .keep = static_cast<int>(random() % 3),
                        .processes = several ? layouts[layout].ranks : 0,
                        .rank = static_cast<int>(random() % static_cast<std::uint32_t>(layouts[layout].ranks))};
      const int before = counts.faults();
      run_trial(kind, trial, random, counts);
      if (counts.faults() != before)
        fmt::print("trial {} failed: {} --every {} --keep {}{}\n", number, layouts[layout].options, trial.every,
                   trial.keep, several ? fmt::format(", rank {} of {} processes", trial.rank, trial.processes) : "");
      else
        fs::remove_all(folder);
    }
  }
  const bool right =
      std::ranges::all_of(all, [](const auto& of_kind) { return of_kind.second.faults() == 0; }) &&
      all[Kind::killed].kills > 0 && all[Kind::one_of_several_killed].kills > 0;
  if (right) fs::remove_all(root);
  print_table(all);
  return right ? 0 : 1;
}

}  // namespace
}  // namespace parplan

int main(int count, char** words) {
  int trials = 200;
  std::uint32_t seed = 20261122;
  for (int i = 2; i + 1 < count; i += 2) {
    const std::string word = words[i];
    if (word == "--trials") trials = std::atoi(words[i + 1]);
    if (word == "--seed") seed = static_cast<std::uint32_t>(std::atol(words[i + 1]));
  }
  try {
    if (count < 2) throw parplan::ConfigError("the folder to work in is missing");
    return parplan::run_campaign(words[1], trials, seed);
  } catch (const std::exception& error) {
    fmt::print("{}\n", error.what());
    return 1;
  }
}
