// A pool of threads that do the tasks of one job at a time, handed out one by one.
//
// A thread that the system takes off its core costs the others no more than the task it holds. Who waits spins briefly
// and then sleeps: these threads share their cores with the other stages.
#pragma once

#include <atomic>
#include <thread>
#include <vector>

#include "tokenloom.h"

struct TlPool {
 public:
  using Task = void (*)(void* context, int index);

  explicit TlPool(int num_threads);
  ~TlPool();
  TlPool(const TlPool&) = delete;
  TlPool& operator=(const TlPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Do task(context, i) for i in [0, num_tasks), here and in the workers; returns when all are done.
  void run(int num_tasks, Task task, void* context);

  // The same for something callable as f(int).
  template <typename F>
  void each(int num_tasks, F&& f) {
    run(num_tasks, [](void* context, int index) { (*static_cast<F*>(context))(index); }, &f);
  }

 private:
  void work();
  bool take(uint32_t job, int& index);
  void do_tasks(uint32_t job);

  std::vector<std::thread> workers_;
  // The job's number in the upper half, the next task in the lower: a task is only taken from the job one knows.
  std::atomic<uint64_t> next_{0};
  std::atomic<uint32_t> job_{0};  // workers sleep on it
  std::atomic<int> num_sleeping_{0};
  std::atomic<int> num_left_{0};
  std::atomic<bool> is_ending_{false};
  std::atomic<Task> task_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<int> num_tasks_{0};
};
