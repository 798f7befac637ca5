// InlineVector: a short vector inside its owner. It never allocates; to exceed its capacity is a bug.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>

#include "base/check.h"

namespace perigee {

template <typename T, size_t kCapacity>
class InlineVector {
 public:
  using value_type = T;
  using iterator = T*;
  using const_iterator = const T*;

  constexpr InlineVector() = default;
  constexpr InlineVector(std::initializer_list<T> values) { append(values.begin(), values.end()); }

  static constexpr size_t capacity() { return kCapacity; }
  constexpr size_t size() const { return size_; }
  constexpr bool empty() const { return size_ == 0; }

  constexpr T* begin() { return values_.data(); }
  constexpr T* end() { return values_.data() + size_; }
  constexpr const T* begin() const { return values_.data(); }
  constexpr const T* end() const { return values_.data() + size_; }
  constexpr const T& operator[](size_t i) const {
    DCHECK(i < size_, "element ", i, " of ", size_);
    return values_[i];
  }
  constexpr T& operator[](size_t i) {
    DCHECK(i < size_, "element ", i, " of ", size_);
    return values_[i];
  }
  constexpr const T& back() const { return (*this)[size_ - 1u]; }

  constexpr void push_back(const T& value) {
    CHECK(size_ < kCapacity, "more than ", kCapacity, " elements");
    values_[size_++] = value;
  }
  template <typename Iterator>
  constexpr void append(Iterator first, Iterator last) {
    for (; first != last; ++first) push_back(*first);
  }
  // New elements are T().
  constexpr void resize(size_t size) {
    CHECK(size <= kCapacity, "more than ", kCapacity, " elements");
    for (size_t i = size_; i < size; ++i) values_[i] = T();
    size_ = static_cast<uint32_t>(size);
  }
  constexpr void clear() { size_ = 0; }

  friend constexpr bool operator==(const InlineVector& a, const InlineVector& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end());
  }

 private:
  std::array<T, kCapacity> values_{};
  uint32_t size_ = 0;
};

}  // namespace perigee
