#include "planner/calibrate/training_log.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <vector>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/base/text.h"

namespace parplan {
namespace {

// How programs that train print their steps.
struct LogFormat {
  std::string_view written_by;
  std::string_view words;  // that stand before the number
  // The step from the number; letters as in the log.
  Seconds (*step)(double number, const LoggedJob& job) = nullptr;
};

Seconds in_milliseconds(double number, const LoggedJob&) {
  return Seconds(number * 1e-3);
}
Seconds in_seconds(double number, const LoggedJob&) {
  return Seconds(number);
}
Seconds of_tokens(double per_device, const LoggedJob& job) {
  const double tokens = static_cast<double>(job.global_batch) * static_cast<double>(job.sequence_length);
  return Seconds(tokens / (per_device * job.devices));
}
Seconds of_samples(double per_second, const LoggedJob& job) {
  return Seconds(static_cast<double>(job.global_batch) / per_second);
}

// The first that any line of a log has is the log's.
constexpr std::array formats = {
    // NVIDIA/Megatron-LM megatron/training/training.py, training_log; forks print seconds
    // (bigscience-workshop/Megatron-DeepSpeed).
    LogFormat{"Megatron-LM", "elapsed time per iteration (ms):", in_milliseconds},
    LogFormat{"Megatron-DeepSpeed", "elapsed time per iteration (s):", in_seconds},
    // NeMo's progress bar.
    LogFormat{"NeMo", "train_step_timing in s:", in_seconds},
    LogFormat{"NeMo", "train_step_timing in s=", in_seconds},
    // huggingface/nanotron src/nanotron/trainer.py, train_step_logs: "3.21K".
    LogFormat{"nanotron", "elapsed_time_per_iteration_ms:", in_milliseconds},
    // microsoft/DeepSpeed deepspeed/runtime/pipe/engine.py, train_batch.
    LogFormat{"DeepSpeed", "iter time (s):", in_seconds},
    // pytorch/torchtitan torchtitan/components/metrics.py: tokens a second and device; "wps" before
    // December 2024.
    LogFormat{"torchtitan", "tps:", of_tokens},
    LogFormat{"torchtitan", "wps:", of_tokens},
    // microsoft/DeepSpeed deepspeed/utils/timer.py, ThroughputTimer: what passes outside the
    // engine's calls is left out.
    LogFormat{"DeepSpeed", "CurrSamplesPerSec=", of_samples},
};

// The text without the sequences that colour it (ECMA-48, control sequence introducer).
std::string without_colours(std::string_view text) {
  std::string plain;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '\x1b' || i + 1 >= text.size() || text[i + 1] != '[') {
      plain += text[i];
      continue;
    }
    i += 2;
    while (i < text.size() && (text[i] < '@' || text[i] > '~')) ++i;
  }
  return plain;
}

// The number that stands at the begin of a text, behind spaces: "19234.5", "3,456", "3.21K".
std::optional<double> number_at(std::string_view text) {
  std::size_t at = text.find_first_not_of(' ');
  if (at == std::string_view::npos) return std::nullopt;
  std::string digits;
  for (; at < text.size(); ++at) {
    const char c = text[at];
    const bool is_digit = c >= '0' && c <= '9';
    const bool groups = c == ',' && at + 1 < text.size() && text[at + 1] >= '0' && text[at + 1] <= '9';
    if (is_digit || c == '.')
      digits += c;
    else if (!groups)
      break;
  }
  constexpr std::size_t most_digits = 30;
  if (digits.empty() || digits.size() > most_digits || std::ranges::count(digits, '.') > 1 || digits == ".")
    return std::nullopt;
  double value = std::stod(digits);
  if (at < text.size() && (text[at] == 'e' || text[at] == 'E')) return std::nullopt;
  if (at < text.size() && text[at] == 'K') value *= 1e3;
  if (at < text.size() && text[at] == 'M') value *= 1e6;
  return value > 0.0 && std::isfinite(value) ? std::optional(value) : std::nullopt;
}

std::optional<double> number_behind(std::string_view line, std::string_view words) {
  const std::size_t found = line.find(words);
  return found == std::string_view::npos ? std::nullopt : number_at(line.substr(found + words.size()));
}

// Nearest rank.
Seconds percentile(const std::vector<Seconds>& sorted, double share) {
  return sorted[static_cast<std::size_t>(std::lround(share * static_cast<double>(sorted.size() - 1)))];
}

}  // namespace

LoggedSteps read_training_log(const std::string& text, const std::string& file_name, const LoggedJob& job) {
  const std::string plain = without_colours(text);
  LoggedSteps logged;
  for (const LogFormat& format : formats) {
    std::vector<Seconds> steps;
    std::optional<double> other_batch;
    for (std::size_t begin = 0; begin < plain.size();) {
      const std::size_t end = std::min(plain.find_first_of("\r\n", begin), plain.size());
      const std::string_view line = std::string_view(plain).substr(begin, end - begin);
      begin = end + 1;
      const std::optional<double> number = number_behind(line, format.words);
      if (!number) continue;
      const std::optional<double> batch = number_behind(line, "global batch size:");
      if (batch && *batch != static_cast<double>(job.global_batch)) {
        other_batch = batch;
        ++logged.other_batches;
        continue;
      }
      steps.push_back(format.step(*number, job));
    }
    if (steps.empty() && other_batch)
      throw ConfigError({file_name}, fmt::format("all steps of this log have another global batch, such as {:.0f}, "
                                                 "than the {} of this layout; give it with --global-batch",
                                                 *other_batch, job.global_batch));
    if (steps.empty()) continue;
    logged.written_by = format.written_by;
    const std::size_t warm_up = steps.size() == 1 ? 0 : std::max<std::size_t>(steps.size() / 10, 1);
    steps.erase(steps.begin(), steps.begin() + static_cast<std::ptrdiff_t>(warm_up));
    std::ranges::sort(steps);
    logged.lines = static_cast<int>(steps.size());
    const std::size_t half = steps.size() / 2;
    logged.median = steps.size() % 2 == 1 ? steps[half] : (steps[half - 1] + steps[half]) / 2.0;
    logged.low = percentile(steps, 0.1);
    logged.high = percentile(steps, 0.9);
    return logged;
  }
  std::vector<std::string> known;
  for (const LogFormat& format : formats) known.push_back(fmt::format("'{}'", format.words));
  throw ConfigError({file_name}, fmt::format("this log has no step: no line has a number behind one of {}; give the "
                                             "time with --measured-step",
                                             join(known)));
}

}  // namespace parplan
