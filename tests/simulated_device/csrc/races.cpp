#include "races.h"

#include <set>

#include "counters.h"
#include "memory.h"
#include "python_frames.h"

namespace simulated {
namespace {

std::vector<std::string>& found() {
  static auto* texts = new std::vector<std::string>();
  return *texts;
}

std::set<std::string>& known() {
  static auto* texts = new std::set<std::string>();
  return *texts;
}

std::atomic<bool> detects{true};

void report(const std::string& text) {
  if (known().insert(text).second) found().push_back(text);
}

std::string described(const Access& access) {
  return name_of(access.stream) + (access.is_write ? " writes (" : " reads (") + access.what + ")";
}

void note(StreamId id, Span span, bool is_write, const std::string& what) {
  if (span.is_empty() || !detects) return;
  Access access{span, id, stream(id).clock[id], is_write, what};
  Block* block = block_at(span.begin);
  if (block == nullptr) return report(described(access) + " in memory that nobody has allocated");
  if (!block->is_used)
    report(described(access) + " in memory that was freed at " + block->freed_at);
  const Clock& clock = stream(id).clock;
  for (const Access& before : block->history.accesses()) {
    bool may_clash = before.stream != id && (before.is_write || is_write);
    if (may_clash && before.span.overlaps(span) && clock[before.stream] < before.time)
      report(described(before) + "; " + described(access));
  }
  block->history.add(access);
}

void note_all(StreamId id, const std::vector<Span>& reads, const std::vector<Span>& writes,
              const std::string& what) {
  for (const Span& span : reads) note(id, span, false, what);
  for (const Span& span : writes) note(id, span, true, what);
}

std::string with_place(const std::string& name) {
  return detects ? name + " at " + where() : name;
}

}  // namespace

void History::add(const Access& access) {
  // A later access of the same bytes stands for earlier ones of its own stream, and a write for
  // all that it is ordered behind.
  const Clock& clock = stream(access.stream).clock;
  auto is_covered = [&](const Access& before) {
    return access.span.holds(before.span) && (access.is_write || !before.is_write) &&
           (access.is_write ? clock[before.stream] >= before.time
                            : before.stream == access.stream);
  };
  accesses_.erase(std::remove_if(accesses_.begin(), accesses_.end(), is_covered),
                  accesses_.end());
  accesses_.push_back(access);
}

void History::forget(const Clock& clock) {
  auto is_behind = [&](const Access& access) { return clock[access.stream] >= access.time; };
  accesses_.erase(std::remove_if(accesses_.begin(), accesses_.end(), is_behind), accesses_.end());
}

void launch_made(StreamId id, const std::function<Work()>& make_work,
                 const std::vector<Span>& reads, const std::vector<Span>& writes,
                 const std::string& name) {
  std::string what = with_place(name);
  StateLock lock(state_mutex);
  tick(id);
  counters().launches[name_of(id) + " " + name]++;
  note_all(id, reads, writes, what);
  stream(id).enqueue(make_work());
}

void launch(StreamId id, Work work, const std::vector<Span>& reads,
            const std::vector<Span>& writes, const std::string& name) {
  launch_made(id, [&] { return std::move(work); }, reads, writes, name);
}

void note_allocation(StreamId id, Span span, const std::string& what) {
  note(id, span, true, what);
}

void note_reuse(StreamId id, const Access& left, const std::string& freed_at,
                const std::string& what) {
  if (!detects) return;
  report(described(left) + "; " + name_of(id) + " may reuse the memory, freed at " + freed_at +
         " (" + what + ")");
}

void note_on_host(StreamId id, const std::vector<Span>& reads, const std::vector<Span>& writes,
                  const std::string& name) {
  std::string what = with_place(name);
  StateLock lock(state_mutex);
  tick(id);
  note_all(id, reads, writes, what);
  join(host_clock(), stream(id).clock);
}

std::vector<std::string> races() {
  StateLock lock(state_mutex);
  return found();
}

void clear_races() {
  StateLock lock(state_mutex);
  found().clear();
  known().clear();
}

void set_detection(bool is_on) { detects = is_on; }
bool is_detecting() { return detects; }

}  // namespace simulated
