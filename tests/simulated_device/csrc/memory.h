// Memory of the device. Every address exists twice: as the host sees it, where any touch is a
// fault, and as kernels see it.
//
//   device pointers   PROT_NONE      what tensors hold
//   kernel_address    read, write    the same pages, for the threads of streams only
//
// The allocator keeps one pool for each stream, as CUDA's does, and is as unkind as it may be: a
// freed block is handed out at once, the latest one first, and what is handed out is filled with
// NaN by the stream that asked. `mark_used_by` (record_stream) holds a block back until the named
// streams have passed the point where it was freed. Pinned memory is ordinary memory that the
// device may copy from and to without holding up the host.
#pragma once

#include <map>
#include <set>
#include <string>

#include "common.h"
#include "races.h"

namespace simulated {

struct Block {
  Span span;
  StreamId owner;  // kHost: pinned memory
  bool is_used = true;
  std::set<StreamId> used_by{};  // named by mark_used_by since the allocation
  History history{};
  std::string freed_at{};
};

struct PoolSize {
  size_t allocated = 0;
  size_t peak_allocated = 0;
  size_t reserved = 0;
};

Block* allocate(size_t size_bytes);  // on the current stream; throws std::bad_alloc
void free_block(Block* block);
void mark_used_by(const void* pointer, StreamId id);
bool is_device_pointer(const void* pointer);
void* kernel_address(const void* pointer);

void* allocate_pinned(size_t size_bytes);
void free_pinned(void* pointer);
bool is_pinned(const void* pointer);

Block* block_at(uintptr_t address);  // hold state_mutex

std::map<StreamId, PoolSize> pool_sizes();
PoolSize all_pools();
void reset_peaks();

// Reserves the addresses, and explains a touch by the host before the process ends.
void open_memory();

}  // namespace simulated
