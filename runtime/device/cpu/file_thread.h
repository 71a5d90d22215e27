#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "runtime/device/file_transfer.h"

namespace parplan {

// The thread of one stream of file transfers, which carries them out one after another while the
// rank's own thread goes on. Work is posted and numbered from 1. After a transfer has failed, the
// rest is not carried out, and whoever waits hears of it.
class FileThread {
 public:
  using Time = std::chrono::steady_clock::time_point;

  FileThread() : thread_([this] { carry_out(); }) {}
  ~FileThread();
  FileThread(const FileThread&) = delete;
  FileThread& operator=(const FileThread&) = delete;

  void post(const FileTransfer& transfer) { push({.transfer = transfer, .until = {}, .marked = nullptr}); }
  // Later work begins once the other has done so much.
  void post_wait(FileThread& other, std::int64_t number) {
    push({.transfer = {}, .until = {&other, number}, .marked = nullptr});
  }
  // Notes the time at which it gets there.
  void post_mark(Time& mark) { push({.transfer = {}, .until = {}, .marked = &mark}); }
  std::int64_t posted() const { return posted_; }  // for the thread that posts

  // Returns when so much is done, or will not be; never throws.
  void wait_for(std::int64_t number);
  // Returns when all is done; throws what a transfer has thrown, once.
  void wait_for_all();

 private:
  struct Until {
    FileThread* other = nullptr;
    std::int64_t number = 0;
  };
  struct Item {
    FileTransfer transfer;
    Until until;
    Time* marked = nullptr;
  };

  void push(const Item& item);
  void carry_out();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Item> items_;  // emptied when all are done, so that its memory is used again
  std::size_t taken_ = 0;
  std::int64_t posted_ = 0, done_ = 0;
  bool ends_ = false;
  std::exception_ptr failure_;
  std::thread thread_;  // last: it uses the others
};

}  // namespace parplan
