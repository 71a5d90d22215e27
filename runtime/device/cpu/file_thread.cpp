#include "runtime/device/cpu/file_thread.h"

#include <utility>

namespace parplan {

FileThread::~FileThread() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void FileThread::push(const Item& item) {
  {
    const std::lock_guard lock(mutex_);
    items_.push_back(item);
    ++posted_;
  }
  changed_.notify_all();
}

void FileThread::wait_for(std::int64_t number) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return done_ >= number; });
}

void FileThread::wait_for_all() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return done_ >= posted_; });
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void FileThread::carry_out() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return ends_ || taken_ < items_.size(); });
    if (ends_) return;
    const Item item = items_[taken_++];
    const bool goes_on = !failure_;
    lock.unlock();
    std::exception_ptr failure;
    try {
      if (item.until.other != nullptr) item.until.other->wait_for(item.until.number);
      if (item.transfer.carry_out != nullptr && goes_on) item.transfer.carry_out(item.transfer);
    } catch (...) {
      failure = std::current_exception();
    }
    if (item.marked != nullptr) *item.marked = std::chrono::steady_clock::now();
    lock.lock();
    if (failure) failure_ = failure;
    ++done_;
    if (taken_ == items_.size()) {
      items_.clear();
      taken_ = 0;
    }
    changed_.notify_all();
  }
}

}  // namespace parplan
