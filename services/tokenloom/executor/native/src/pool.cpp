#include "pool.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

namespace {

constexpr int kSpins = 2000;  // some 20 to 50 us

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

TlPool::TlPool(int num_threads) {
  for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this] { work(); });
}

TlPool::~TlPool() {
  is_ending_ = true;
  job_.fetch_add(1);
  wake_all(job_);
  for (auto& worker : workers_) worker.join();
}

void TlPool::run(int num_tasks, Task task, void* context) {
  if (num_tasks <= 0) return;
  if (workers_.empty() || num_tasks == 1) {
    for (int i = 0; i < num_tasks; ++i) task(context, i);
    return;
  }
  const uint32_t job = job_.load(std::memory_order_relaxed) + 1;
  const uint64_t first = static_cast<uint64_t>(job) << 32;
  next_.store(first | 0xffffffffu, std::memory_order_seq_cst);  // a late worker of the last job finds nothing more
  task_.store(task, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  num_tasks_.store(num_tasks, std::memory_order_relaxed);
  num_left_.store(num_tasks, std::memory_order_relaxed);
  next_.store(first, std::memory_order_release);
  job_.store(job, std::memory_order_seq_cst);
  if (num_sleeping_.load(std::memory_order_seq_cst) > 0) wake_all(job_);
  do_tasks(job);
  for (int spins = 0; num_left_.load(std::memory_order_acquire) > 0; ++spins) {
    if (spins < kSpins) {
      pause_briefly();
    } else {
      sched_yield();  // whoever holds the last task may be waiting for this core
    }
  }
}

bool TlPool::take(uint32_t job, int& index) {
  uint64_t seen = next_.load(std::memory_order_acquire);
  while (static_cast<uint32_t>(seen >> 32) == job) {
    index = static_cast<int>(seen & 0xffffffffu);
    if (static_cast<uint32_t>(index) >= static_cast<uint32_t>(num_tasks_.load(std::memory_order_relaxed))) return false;
    if (next_.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) return true;
  }
  return false;
}

// A taken task belongs to `job`, which cannot end before the task is done: what was read of the job is of that job.
void TlPool::do_tasks(uint32_t job) {
  for (int index; take(job, index);) {
    task_.load(std::memory_order_relaxed)(context_.load(std::memory_order_relaxed), index);
    num_left_.fetch_sub(1, std::memory_order_acq_rel);
  }
}

void TlPool::work() {
  uint32_t done = 0;
  while (!is_ending_.load(std::memory_order_acquire)) {
    uint32_t job = job_.load(std::memory_order_acquire);
    for (int spins = 0; job == done && spins < kSpins; ++spins) {
      pause_briefly();
      job = job_.load(std::memory_order_acquire);
    }
    if (job == done) {
      num_sleeping_.fetch_add(1, std::memory_order_seq_cst);
      sleep_while(job_, done);
      num_sleeping_.fetch_sub(1, std::memory_order_seq_cst);
      continue;
    }
    do_tasks(job);
    done = job;
  }
}
