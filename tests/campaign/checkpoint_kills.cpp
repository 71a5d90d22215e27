// Kills runs at random places of their checkpoints' life and lets them go on, many times:
//   checkpoint_kills FOLDER [--trials N] [--seed N]
// FOLDER is where it works; what stays there is of trials that failed. Each trial trains a tiny
// model under a random layout with random --every and --keep. Each life of it but the last is
// killed at a random call that changes a file (kill_at_call.cpp), before, within or after the call.
// After each life, the whole checkpoints have to be those that were given their names and not
// removed, each good in every byte; the next life has to begin with the newest; and all lives have
// to have the losses of a run that was never killed, to the bit. Prints a table and fails where
// that does not hold.
#include <sys/wait.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
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

const std::vector<std::string> layouts = {
    "--dp 1 --tp 1 --pp 1",          "--dp 2 --tp 1 --pp 1",          "--dp 2 --tp 1 --pp 1 --zero 3",
    "--dp 1 --tp 2 --pp 1",          "--dp 1 --tp 1 --pp 2",          "--dp 2 --tp 1 --pp 2 --zero 1",
    "--dp 2 --tp 2 --pp 1 --zero 2", "--dp 4 --tp 1 --pp 1 --zero 3",
};

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
  std::string killed;                     // at which kind of call
  std::set<std::string> whole;            // checkpoints by their last name, of all lives so far
  std::map<std::int64_t, double> losses;  // by step
};

struct Counts {
  int lives = 0, kills = 0, checked = 0;
  int lost = 0, half = 0, damaged = 0, begun_elsewhere = 0, other_losses = 0, left_over = 0, failed = 0;
  std::map<std::string, int> kills_at;
  int faults() const { return lost + half + damaged + begun_elsewhere + other_losses + left_over + failed; }
};

struct Trial {
  std::string folder;
  const Whole& whole;
  int every = 1;
  int keep = 0;

  std::string checkpoints() const { return folder + "/checkpoints"; }

  Life live(long kill_at, const std::string& how) const {
    const std::string log = folder + "/log", record = folder + ".record";  // not a file that counts
    fs::remove(log);
    Life life;
    life.code =
        shell(fmt::format("timeout 100 env LD_PRELOAD={} KILL_FOLDER={} KILL_RECORD={} KILL_AT={} KILL_HOW={} {} run "
                          "{} --steps {} --checkpoint {} "
                          "--every {} {} --resume --quiet --log {} > {}/said 2>&1",
                          PARPLAN_KILL_AT_CALL, folder, record, kill_at, how, PARPLAN_BINARY, whole.plan, steps,
                          checkpoints(), every, keep > 0 ? fmt::format("--keep {}", keep) : "", log, folder));
    std::ifstream lines(record);
    for (std::string word, value; lines >> word >> value;) {
      if (word == "whole") life.whole.insert(value);
      if (word == "removed") life.whole.erase(value);
      if (word == "calls") life.calls = std::stol(value);
      if (word == "killed") life.killed = value;
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
    for (const std::string& name : life.whole) counts.lost += found.contains(name) ? 0 : 1;
    for (const std::string& name : found) counts.half += life.whole.contains(name) ? 0 : 1;
    if (!life.losses.empty() && life.losses.begin()->first != expected_first) ++counts.begun_elsewhere;
    for (const auto& [step, loss] : life.losses)
      if (loss != whole.losses.at(static_cast<std::size_t>(step))) ++counts.other_losses;
  }
};

std::int64_t newest(const Trial& trial) {
  const std::vector<std::int64_t> steps_done = complete_checkpoints(trial.checkpoints());
  return steps_done.empty() ? 0 : steps_done.back();
}

// `most`: the calls of a run that nobody kills; a life that makes fewer than it was to make ends by
// itself.
void run_trial(const Trial& trial, std::uint32_t most, std::mt19937& random, Counts& counts) {
  const char* const ways[] = {"before", "within", "after"};
  const std::uint32_t kills = 1 + random() % 3;
  for (std::uint32_t kill = 0; kill <= kills; ++kill) {
    const bool last = kill == kills;
    const std::int64_t first = newest(trial);
    const Life life = trial.live(last ? 0 : static_cast<long>(1 + random() % most), ways[random() % 3]);
    ++counts.lives;
    trial.check(life, first, counts);
    if (life.code == 0) {
      if (newest(trial) != steps) ++counts.lost;
      counts.left_over += static_cast<int>(std::ranges::count_if(
          trial.names(), [](const std::string& name) { return name.find('.') != std::string::npos; }));
      continue;
    }
    if (life.code != 137 || last) {
      fmt::print("  exit code {}: {}\n", life.code, read_file(trial.folder + "/said"));
      ++counts.failed;
      return;
    }
    ++counts.kills;
    ++counts.kills_at[life.killed];
  }
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
  std::map<std::tuple<std::size_t, int, int>, long> calls;  // of a run by layout, --every and --keep
  Counts counts;
  for (int number = 0; number < trials; ++number) {
    const std::size_t layout = random() % layouts.size();
    if (!wholes.contains(layout)) wholes[layout] = make_whole(root, layouts[layout], static_cast<int>(layout));
    const std::string folder = fmt::format("{}/trial-{}", root, number);
    fs::create_directory(folder);
    Trial trial{.folder = folder,
                .whole = wholes[layout],
                .every = static_cast<int>(1 + random() % 3),
                .keep = static_cast<int>(random() % 3)};
    long& most = calls[{layout, trial.every, trial.keep}];
    if (most == 0) {
      most = trial.live(0, "after").calls;
      fs::remove_all(folder);
      fs::remove(folder + ".record");
      fs::create_directory(folder);
    }
    const int before = counts.faults();
    run_trial(trial, static_cast<std::uint32_t>(std::max(most, 1L)), random, counts);
    if (counts.faults() != before)
      fmt::print("trial {} failed: {} --every {} --keep {}\n", number, layouts[layout], trial.every, trial.keep);
    else
      fs::remove_all(folder);
  }
  if (counts.faults() == 0) fs::remove_all(root);
  fmt::print("| | |\n|---|---|\n");
  const auto row = [](const std::string& what, int count) { fmt::print("| {} | {} |\n", what, count); };
  row("trials", trials);
  row("lives", counts.lives);
  row("lives that were killed", counts.kills);
  for (const auto& [call, count] : counts.kills_at) row(fmt::format("of these at `{}`", call), count);
  row("whole checkpoints read to the last byte", counts.checked);
  row("complete checkpoints lost", counts.lost);
  row("half ones taken for whole", counts.half);
  row("whole ones that were damaged", counts.damaged);
  row("lives that did not begin with the newest", counts.begun_elsewhere);
  row("steps with another loss than without kills", counts.other_losses);
  row("temporary folders left at the end", counts.left_over);
  row("lives that failed otherwise", counts.failed);
  return counts.faults() == 0 && counts.kills > 0 ? 0 : 1;
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
