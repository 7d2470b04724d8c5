// SPDX-License-Identifier: Apache-2.0
//
// How branches grow, split and join. Eviction and the audit are in eviction.cc.
//
// Each branch caches whether it stays (something in or after it is in use) and whether it blocks
// its parent (it has pages, or something after it has). Update recomputes both, the sums and the
// idle order, and moves up only while a flag changes; that is what keeps calls independent of the
// number of sessions. Order nodes are kept in Branch::entry while a branch is not in the order, so
// that filing it never allocates.
//
// Split moves the first pages into a new parent, so that a leaf keeps its address. Cut makes a new
// leaf if the old one is being read: the readers keep the cut-off pages in the old branch.

#include "server/sessions/page_tree.h"

#include <algorithm>
#include <cassert>

#include "server/memory/memory_reserve.h"

namespace attend {

PageTree::PageTree(HostSpan memory, int64_t slab_bytes, std::function<void(char*, int64_t)> on_free,
                   const TenantWeights& weights, Ledger& lists)
    : pool_(memory, slab_bytes, std::move(on_free)),
      ledger_(pool_.stats().total_bytes, weights),
      lists_(lists),
      idle_(weights.size()),
      idle_bytes_(weights.size()) {}

PageTree::~PageTree() {
  while (Branch* branch = root_.first_child) {
    while (branch->first_child != nullptr) branch = branch->first_child;
    Delete(*branch);
  }
}

void PageTree::Take(int tenant, int64_t page_bytes, int64_t count, std::vector<PageNumber>& pages) {
  pool_.Take(page_bytes, count, pages);
  ledger_.Add(tenant, count * Charge(page_bytes));
  lists_.Add(tenant, count * kPageEntryBytes);
}

void PageTree::Give(int tenant, std::span<const PageNumber> pages) {
  for (const PageNumber page : pages) ledger_.Add(tenant, -Charge(pool_.page_bytes(page)));
  lists_.Add(tenant, -std::ssize(pages) * kPageEntryBytes);
  pool_.Give(pages);
}

std::unique_ptr<PageTree::Branch> PageTree::NewBranch(const Branch& like) {
  auto branch = std::make_unique<Branch>();
  branch->tenant = like.tenant;
  branch->page_bytes = like.page_bytes;
  branch->begin = like.begin;
  branch->last_used = like.last_used;
  branch->pages.resize(like.page_bytes->size());
  IdleOrder order;
  order.insert({branch->last_used, branch.get()});
  branch->entry = order.extract(order.begin());
  return branch;
}

PageTree::Branch* PageTree::Plant(int tenant,
                                  std::shared_ptr<const std::vector<int64_t>> page_bytes, bool kept,
                                  TimePoint now) {
  Branch like;
  like.tenant = tenant;
  like.page_bytes = std::move(page_bytes);
  like.last_used = now;
  Branch* const leaf = NewBranch(like).release();
  leaf->leaf = true;
  leaf->kept = kept;
  Link(*leaf, root_);
  Update(*leaf);
  return leaf;
}

PageTree::Branch* PageTree::Fork(Branch& leaf, int64_t pages, bool kept, TimePoint now) {
  std::unique_ptr<Branch> fork = NewBranch(leaf);
  Branch* const parent = pages == 0 ? &root_ : EndingAt(leaf, pages);
  fork->leaf = true;
  fork->kept = kept;
  fork->begin = pages;
  Link(*fork, *parent);
  Update(*fork);
  Update(*parent);
  Touch(*fork, now);
  return fork.release();
}

PageTree::Branch* PageTree::EndingAt(Branch& from, int64_t pages) {
  assert(pages > 0);
  Branch* branch = &from;
  while (branch->begin >= pages) branch = branch->parent;
  return !branch->leaf && End(*branch) == pages ? branch : Split(*branch, pages);
}

PageTree::Branch* PageTree::Split(Branch& branch, int64_t pages) {
  std::unique_ptr<Branch> before = NewBranch(branch);
  const int64_t moved = pages - branch.begin;
  for (size_t n = 0; n < branch.pages.size(); ++n) {
    // The shorter part gets a new list. The later part keeps as much spare capacity as there was.
    const std::vector<PageNumber>& all = branch.pages[n];
    const auto after = std::ssize(all) - moved;
    assert(moved > 0 && after >= 0);
    before->pages[n].reserve(moved < after ? moved : all.capacity() - moved);
  }
  for (size_t n = 0; n < branch.pages.size(); ++n) {
    std::vector<PageNumber>& first = before->pages[n];
    std::vector<PageNumber>& all = branch.pages[n];
    const auto end = all.begin() + moved;
    if (moved < std::ssize(all) - moved) {
      first.assign(all.begin(), end);
      all.erase(all.begin(), end);
    } else {
      first.assign(end, all.end());
      all.resize(static_cast<size_t>(moved));
      first.swap(all);
    }
    before->bytes += moved * (*branch.page_bytes)[n];
  }
  branch.bytes -= before->bytes;
  branch.begin = pages;
  Branch& parent = *branch.parent;
  Unlink(branch);
  Link(*before, parent);
  Link(branch, *before);
  Update(branch);
  Update(*before);
  Update(parent);
  return before.release();
}

void PageTree::Join(Branch& branch) {
  Branch& child = *branch.first_child;
  const bool reserved = TryAllocating([&] {
    for (size_t n = 0; n < branch.pages.size(); ++n) {
      branch.pages[n].reserve(branch.pages[n].size() + child.pages[n].capacity());
    }
  });
  if (!reserved) return;  // retried by Settle of a later leaf
  for (size_t n = 0; n < branch.pages.size(); ++n) {
    std::vector<PageNumber>& pages = branch.pages[n];
    pages.insert(pages.end(), child.pages[n].begin(), child.pages[n].end());
    pages.swap(child.pages[n]);
  }
  child.begin = branch.begin;
  child.bytes += std::exchange(branch.bytes, 0);
  Branch& parent = *branch.parent;
  Unlink(child);
  Link(child, parent);
  Delete(branch);
  Update(child);
  Update(parent);
}

PageTree::Branch* PageTree::Cut(Branch& leaf, std::span<const int64_t> kept, int64_t room) {
  const int64_t least = *std::min_element(kept.begin(), kept.end());
  const bool read = IsRead(leaf);
  const bool within = least >= leaf.begin;
  std::unique_ptr<Branch> made;
  if (read) made = NewBranch(leaf);
  Branch& end = read ? *made : leaf;
  for (size_t n = 0; n < kept.size(); ++n) {
    end.pages[n].reserve(static_cast<size_t>((within ? kept[n] - leaf.begin : 0) + room));
  }
  Branch* const before = leaf.parent;
  Branch* const parent = within ? before : least == 0 ? &root_ : EndingAt(*before, least);
  for (size_t n = 0; n < kept.size(); ++n) {  // nothing fails from here on
    std::vector<PageNumber>& pages = leaf.pages[n];
    const auto rest = pages.begin() + (within ? kept[n] - leaf.begin : 0);
    if (!read) {
      const std::span<const PageNumber> given(rest, pages.end());
      leaf.bytes -= std::ssize(given) * (*leaf.page_bytes)[n];
      Give(leaf.tenant, given);
      pages.erase(rest, pages.end());
      continue;
    }
    const int64_t bytes = (rest - pages.begin()) * (*leaf.page_bytes)[n];
    end.bytes += bytes;
    leaf.bytes -= bytes;
    end.pages[n].assign(pages.begin(), rest);
    pages.erase(pages.begin(), rest);
  }
  const bool is_kept = leaf.kept;
  if (read || !within) {
    if (!read || within) Unlink(leaf);
    leaf.leaf = leaf.kept = false;
    end.begin = within ? leaf.begin : least;
    Link(end, *parent);
    if (read && within) Link(leaf, end);  // the pages cut off, for their readers
  }
  end.leaf = true;
  end.kept = is_kept;
  static_cast<void>(made.release());
  Update(leaf);
  Update(end);
  Update(*parent);
  Update(*before);
  if (read) Release(&leaf);  // its successors may be all that is read
  if (parent != before) Release(before);
  return &end;
}

void PageTree::Leave(Branch& leaf) {
  leaf.leaf = leaf.kept = false;
  Update(leaf);
  Release(&leaf);
}

void PageTree::Settle(Branch& leaf) {
  if (leaf.bytes > 0) return;  // so no predecessor was evicted
  Branch* const before = leaf.parent;
  Branch* parent = before;
  while (parent != &root_ && parent->bytes == 0) parent = parent->parent;
  leaf.begin = parent == &root_ ? 0 : End(*parent);
  if (parent != before) {
    Unlink(leaf);
    Link(leaf, *parent);
    Update(*before);
    Update(*parent);
  }
  Release(before);
}

void PageTree::Reserve(Branch& leaf, size_t layer, int64_t more) {
  std::vector<PageNumber>& pages = leaf.pages[layer];
  const size_t wanted = pages.size() + static_cast<size_t>(more);
  // At least doubles the capacity, so that a list that grows page by page is rarely moved.
  if (pages.capacity() < wanted) pages.reserve(std::max(wanted, 2 * pages.capacity()));
}

void PageTree::Append(Branch& leaf, size_t layer, std::span<const PageNumber> pages) {
  if (pages.empty()) return;
  leaf.pages[layer].insert(leaf.pages[layer].end(), pages.begin(), pages.end());
  leaf.bytes += std::ssize(pages) * (*leaf.page_bytes)[layer];
  Update(leaf);
}

void PageTree::Fit(Branch& leaf, size_t layer) {
  std::vector<PageNumber>& pages = leaf.pages[layer];
  if (2 * pages.size() >= pages.capacity()) return;
  TryAllocating([&] { pages.shrink_to_fit(); });  // otherwise it stays where it is
}

void PageTree::Keep(Branch& leaf, bool kept) {
  leaf.kept = kept;
  Update(leaf);
}

void PageTree::Pin(Branch& branch) {
  ++branch.pins;
  Update(branch);
}

void PageTree::Unpin(Branch& branch) {
  --branch.pins;
  assert(branch.pins >= 0);
  Update(branch);
  Release(&branch);
}

void PageTree::Touch(Branch& leaf, TimePoint now) {
  for (Branch* branch = &leaf; branch != &root_; branch = branch->parent) {
    SetLastUsed(*branch, now);
    // Predecessors cannot be evicted before it, so their time of use does not matter.
    if (branch->bytes > 0) return;
  }
}

PageNumber PageTree::PageAt(const Branch& leaf, size_t layer, int64_t index) {
  const Branch* branch = &leaf;
  while (branch->begin > index) branch = branch->parent;
  return branch->pages[layer][static_cast<size_t>(index - branch->begin)];
}

PageNumber* PageTree::CopyPages(const Branch& leaf, size_t layer, PageNumber* to) {
  for (const Branch* branch = &leaf; branch->parent != nullptr; branch = branch->parent) {
    std::copy(branch->pages[layer].begin(), branch->pages[layer].end(), to + branch->begin);
  }
  return to + PagesOf(leaf, layer);
}

void PageTree::Link(Branch& branch, Branch& parent) {
  branch.parent = &parent;
  branch.previous = nullptr;
  branch.next = parent.first_child;
  if (branch.next != nullptr) branch.next->previous = &branch;
  parent.first_child = &branch;
  ++parent.children;
  parent.blockers += branch.blocks ? 1 : 0;
  parent.stayers += branch.stays ? 1 : 0;
}

void PageTree::Unlink(Branch& branch) {
  Branch& parent = *branch.parent;
  (branch.previous == nullptr ? parent.first_child : branch.previous->next) = branch.next;
  if (branch.next != nullptr) branch.next->previous = branch.previous;
  --parent.children;
  parent.blockers -= branch.blocks ? 1 : 0;
  parent.stayers -= branch.stays ? 1 : 0;
}

void PageTree::SetLastUsed(Branch& branch, TimePoint when) {
  IdleOrder& order = idle_[branch.tenant];
  const bool filed = branch.entry.empty();
  if (filed) branch.entry = order.extract({branch.last_used, &branch});
  branch.last_used = branch.entry.value().first = when;
  if (filed) order.insert(std::move(branch.entry));
}

void PageTree::Update(Branch& changed) {
  for (Branch* branch = &changed; branch != &root_; branch = branch->parent) {
    // Pages before those that stay must stay too.
    const bool stays = branch->pins > 0 || branch->kept || branch->stayers > 0;
    const int64_t idle_bytes = stays ? 0 : branch->bytes;
    const int64_t shared_bytes = branch->leaf || branch->children < 2 ? 0 : branch->bytes;
    idle_bytes_[branch->tenant] += idle_bytes - std::exchange(branch->idle_bytes, idle_bytes);
    shared_bytes_ += shared_bytes - std::exchange(branch->shared_bytes, shared_bytes);
    IdleOrder& order = idle_[branch->tenant];
    const bool idle = !stays && branch->bytes > 0 && branch->blockers == 0;
    if (idle && !branch->entry.empty()) order.insert(std::move(branch->entry));
    if (!idle && branch->entry.empty()) branch->entry = order.extract({branch->last_used, branch});
    const bool blocks = stays || branch->bytes > 0 || branch->blockers > 0;
    const bool blocked = std::exchange(branch->blocks, blocks);
    const bool stayed = std::exchange(branch->stays, stays);
    if (blocks == blocked && stays == stayed) return;
    Branch& parent = *branch->parent;
    parent.blockers += int{blocks} - int{blocked};
    parent.stayers += int{stays} - int{stayed};
    if (&parent != &root_) SetLastUsed(parent, std::max(parent.last_used, branch->last_used));
  }
}

void PageTree::Release(Branch* branch) {
  const auto unused = [this](const Branch& each) {
    return &each != &root_ && !each.leaf && each.pins == 0;
  };
  while (unused(*branch) && branch->children == 0) {
    Branch* const parent = branch->parent;
    GivePages(*branch);
    Delete(*branch);
    Update(*parent);
    branch = parent;
  }
  if (unused(*branch) && branch->children == 1) Join(*branch);
}

void PageTree::GivePages(Branch& branch) {
  for (std::vector<PageNumber>& pages : branch.pages) {
    Give(branch.tenant, pages);
    pages.clear();
  }
  branch.bytes = 0;
}

void PageTree::Delete(Branch& branch) {
  branch.bytes = 0;
  branch.kept = false;
  Update(branch);  // removes it from the order and from the sums
  Unlink(branch);
  delete &branch;
}

}  // namespace attend
