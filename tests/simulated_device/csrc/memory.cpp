#include "memory.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <new>
#include <stdexcept>

#include "counters.h"
#include "python_frames.h"

namespace simulated {
namespace {

constexpr size_t kArenaBytes = size_t(8) << 30;  // addresses; pages exist once they are touched
constexpr size_t kGranule = 512;
constexpr size_t kMaxWaste = 4;  // a block serves requests down to a quarter of its size
constexpr int kPoison = 0xFF;    // NaN in every float dtype, -1 in every integer

char* for_host = nullptr;
char* for_kernels = nullptr;
size_t num_reserved = 0;

struct Pool {
  std::multimap<size_t, Block*> free_blocks;
  PoolSize size;
};

// A freed block that streams were named for: it returns when they have passed these counts.
struct Deferred {
  Block* block;
  std::map<StreamId, uint64_t> until;
  Clock passed;  // what is over then
};

struct State {
  std::map<uintptr_t, Block*> blocks;  // by address, pinned ones too
  std::map<StreamId, Pool> pools;
  std::deque<Deferred> deferred;
  PoolSize total;
};

State& state() {
  static State* all = new State();
  return *all;
}

size_t size_of(const Block& block) { return block.span.end - block.span.begin; }

void take_back(Block* block) {
  state().pools[block->owner].free_blocks.emplace(size_of(*block), block);
}

void take_back_deferred() {
  auto& deferred = state().deferred;
  auto has_returned = [](Deferred& entry) {
    for (const auto& [id, count] : entry.until)
      if (!stream(id).has_passed(count)) return false;
    entry.block->history.forget(entry.passed);
    take_back(entry.block);
    return true;
  };
  deferred.erase(std::remove_if(deferred.begin(), deferred.end(), has_returned), deferred.end());
}

Block* new_block(StreamId id, size_t size_bytes) {
  if (num_reserved + size_bytes > kArenaBytes) throw std::bad_alloc();
  auto begin = reinterpret_cast<uintptr_t>(for_host + num_reserved);
  num_reserved += size_bytes + kGranule;  // the gap makes an overrun a touch of nobody's memory
  auto* block = new Block{{begin, begin + size_bytes}, id};
  state().blocks[begin] = block;
  state().pools[id].size.reserved += size_bytes;
  state().total.reserved += size_bytes;
  count("blocks reserved");
  return block;
}

// The smallest that is large enough, and of those the one that was freed last.
Block* reused_block(StreamId id, size_t size_bytes) {
  auto& blocks = state().pools[id].free_blocks;
  auto fitting = blocks.lower_bound(size_bytes);
  if (fitting == blocks.end() || fitting->first > kMaxWaste * size_bytes) return nullptr;
  auto latest = std::prev(blocks.upper_bound(fitting->first));
  Block* block = latest->second;
  blocks.erase(latest);
  count("blocks reused");
  return block;
}

// The pool may hand out any of its free blocks: which one is chance, so all are looked at.
void check_free_blocks(StreamId id, const std::string& what) {
  for (const auto& [size_bytes, block] : state().pools[id].free_blocks) {
    block->history.forget(stream(id).clock);
    for (const Access& left : block->history.accesses())
      note_reuse(id, left, block->freed_at, what);
  }
}

void add_allocated(PoolSize& size, size_t size_bytes) {
  size.allocated += size_bytes;
  size.peak_allocated = std::max(size.peak_allocated, size.allocated);
}

// -- the host touches what it may not ------------------------------------------------------------
struct sigaction before_us;

void explain_touch(int, siginfo_t* info, void*) {
  auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  if (is_device_pointer(info->si_addr)) {
    fprintf(stderr, "simulated device: the host touched device memory at %p", info->si_addr);
    // Where another thread holds the lock, the address has to do.
    if (state_mutex.try_lock()) {
      if (Block* block = block_at(address))
        fprintf(stderr, ", byte %zu of a block of %zu on the stream '%s'%s",
                static_cast<size_t>(address - block->span.begin), size_of(*block),
                name_of(block->owner).c_str(), block->is_used ? "" : ", which is free");
      state_mutex.unlock();
    }
    std::string place = where_on_python_thread();
    fprintf(stderr, ". Copy it with .cpu() or .to('cpu') first. At %s\n",
            place.empty() ? "a thread without Python" : place.c_str());
    fflush(stderr);
  }
  // The access is repeated on return, and ends in what was there before: Python's faulthandler
  // shows the stack, else the process is killed.
  sigaction(SIGSEGV, &before_us, nullptr);
}

}  // namespace

void open_memory() {
  int file = memfd_create("simulated-device", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, kArenaBytes) != 0)
    throw std::runtime_error("the simulated device gets no memory: memfd_create failed");
  auto map = [&](int protection) {
    void* address =
        mmap(nullptr, kArenaBytes, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (address == MAP_FAILED)
      throw std::runtime_error("the simulated device gets no addresses: mmap failed");
    return static_cast<char*>(address);
  };
  for_kernels = map(PROT_READ | PROT_WRITE);
  for_host = map(PROT_NONE);
  close(file);
  struct sigaction ours {};
  ours.sa_sigaction = explain_touch;
  ours.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &ours, &before_us);
}

bool is_device_pointer(const void* pointer) {
  return pointer >= for_host && pointer < for_host + kArenaBytes;
}

void* kernel_address(const void* pointer) {
  if (pointer == nullptr) return nullptr;
  return for_kernels + (static_cast<const char*>(pointer) - for_host);
}

Block* block_at(uintptr_t address) {
  auto& blocks = state().blocks;
  auto next = blocks.upper_bound(address);
  if (next == blocks.begin()) return nullptr;
  Block* block = std::prev(next)->second;
  return address < block->span.end ? block : nullptr;
}

Block* allocate(size_t size_bytes) {
  std::string what = is_detecting() ? "an allocation at " + where() : "";
  StateLock lock(state_mutex);
  take_back_deferred();
  StreamId id = current_stream();
  tick(id);
  size_t rounded = (size_bytes + kGranule - 1) / kGranule * kGranule;
  if (is_detecting()) check_free_blocks(id, what);
  Block* block = reused_block(id, rounded);
  if (block == nullptr) block = new_block(id, rounded);
  block->is_used = true;
  block->used_by.clear();
  block->history.clear();
  add_allocated(state().pools[id].size, size_of(*block));
  add_allocated(state().total, size_of(*block));
  note_allocation(id, block->span, what);
  void* address = kernel_address(reinterpret_cast<void*>(block->span.begin));
  stream(id).enqueue([address, rounded] { memset(address, kPoison, rounded); });
  return block;
}

void free_block(Block* block) {
  std::string place = is_detecting() ? where_on_python_thread() : "";
  StateLock lock(state_mutex);
  block->is_used = false;
  block->freed_at = place.empty() ? "a thread without Python" : place;
  state().pools[block->owner].size.allocated -= size_of(*block);
  state().total.allocated -= size_of(*block);
  if (block->used_by.empty()) return take_back(block);
  Deferred entry{block, {}, {}};
  for (StreamId id : block->used_by) {
    entry.until[id] = stream(id).num_issued();
    join(entry.passed, stream(id).clock);
  }
  state().deferred.push_back(std::move(entry));
  count("frees deferred by record_stream");
}

void mark_used_by(const void* pointer, StreamId id) {
  StateLock lock(state_mutex);
  count("record_stream");
  Block* block = block_at(reinterpret_cast<uintptr_t>(pointer));
  if (block != nullptr && id != block->owner) block->used_by.insert(id);
}

void* allocate_pinned(size_t size_bytes) {
  size_t rounded = (size_bytes + kGranule - 1) / kGranule * kGranule;
  void* pointer = aligned_alloc(kGranule, rounded);
  if (pointer == nullptr) throw std::bad_alloc();
  auto begin = reinterpret_cast<uintptr_t>(pointer);
  StateLock lock(state_mutex);
  state().blocks[begin] = new Block{{begin, begin + rounded}, kHost};
  count("pinned allocations");
  return pointer;
}

void free_pinned(void* pointer) {
  if (pointer == nullptr) return;
  {
    StateLock lock(state_mutex);
    auto entry = state().blocks.find(reinterpret_cast<uintptr_t>(pointer));
    delete entry->second;
    state().blocks.erase(entry);
  }
  free(pointer);
}

bool is_pinned(const void* pointer) {
  StateLock lock(state_mutex);
  Block* block = block_at(reinterpret_cast<uintptr_t>(pointer));
  return block != nullptr && block->owner == kHost;
}

std::map<StreamId, PoolSize> pool_sizes() {
  StateLock lock(state_mutex);
  std::map<StreamId, PoolSize> sizes;
  for (const auto& [id, pool] : state().pools) sizes[id] = pool.size;
  return sizes;
}

PoolSize all_pools() {
  StateLock lock(state_mutex);
  return state().total;
}

void reset_peaks() {
  StateLock lock(state_mutex);
  for (auto& [id, pool] : state().pools) pool.size.peak_allocated = pool.size.allocated;
  state().total.peak_allocated = state().total.allocated;
}

}  // namespace simulated
