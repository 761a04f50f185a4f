// A handful of threads that live for one call and meet at a barrier between jobs. Plain std::thread:
// no OpenMP runtime to clash with the one PyTorch carries, and nothing left running after a fork.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace laprune {

class Team {
 public:
  explicit Team(int size) : size_(size < 1 ? 1 : size) {
    for (int i = 1; i < size_; ++i) threads_.emplace_back([this, i] { serve(i); });
  }
  ~Team() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true, ++generation_;
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
  }
  int size() const { return size_; }

  // Runs job(0) .. job(size - 1) at the same time and returns when all are done.
  void run(const std::function<void(int)>& job) {
    if (size_ == 1) return job(0);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = &job, pending_.store(size_ - 1), ++generation_;
    }
    wake_.notify_all();
    job(0);
    while (pending_.load() > 0) std::this_thread::yield();
  }

 private:
  void serve(int index) {
    int64_t seen = 0;
    while (true) {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return generation_ != seen; });
      seen = generation_;
      if (stop_) return;
      const auto* job = job_;
      lock.unlock();
      (*job)(index);
      pending_.fetch_sub(1);
    }
  }

  int size_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  const std::function<void(int)>* job_ = nullptr;
  std::atomic<int> pending_{0};
  int64_t generation_ = 0;
  bool stop_ = false;
};

}  // namespace laprune
