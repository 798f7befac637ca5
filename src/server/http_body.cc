#include "server/http_body.h"

#include <algorithm>

namespace perigee {

namespace {

constexpr size_t kSmallBody = 1u << 20;
constexpr size_t kFirstBytes = 4u << 10;
constexpr size_t kMaxSizeLine = 256;  // of a chunk, with its extensions
constexpr size_t kMaxTrailers = 8u << 10;

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  const char lower = static_cast<char>(c | 0x20);
  return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

bool is_text(char c) {
  return (static_cast<unsigned char>(c) >= 0x20 && c != 0x7F) || c == '\t';
}

}  // namespace

bool BodyBudget::take(size_t bytes, size_t body_bytes) {
  const size_t limit = body_bytes <= kSmallBody ? limit_bytes_ : limit_bytes_ - limit_bytes_ / 8;
  size_t used = used_;
  do {
    if (bytes > limit || used > limit - bytes) return false;
  } while (!used_.compare_exchange_weak(used, used + bytes));
  return true;
}

BodyFraming::BodyFraming(std::optional<size_t> content_length, size_t max_bytes)
    : max_bytes_(max_bytes),
      most_(content_length.value_or(max_bytes)),
      state_(content_length ? State::kFixed : State::kSize),
      left_(content_length.value_or(0)) {}

BodyFraming::Status BodyFraming::read_size(char c) {
  if (++line_bytes_ > kMaxSizeLine) return Status::kMalformed;
  const int digit = hex_digit(c);
  if (digit >= 0) {
    left_ = 16 * left_ + static_cast<size_t>(digit);
    return left_ > max_bytes_ - taken_ ? Status::kTooLarge : Status::kMore;
  }
  if (line_bytes_ == 1) return Status::kMalformed;
  state_ = State::kExtension;
  return c == ';' || c == '\r' ? end_size_line(c) : Status::kMalformed;
}

// An extension means nothing here; it is skipped up to the end of its line.
BodyFraming::Status BodyFraming::end_size_line(char c) {
  if (++line_bytes_ > kMaxSizeLine) return Status::kMalformed;
  if (c == '\r')
    state_ = State::kSizeEnd;
  else if (!is_text(c))
    return Status::kMalformed;
  return Status::kMore;
}

// Trailers are read over.
BodyFraming::Status BodyFraming::read_trailer(char c) {
  if (++line_bytes_ > kMaxTrailers) return Status::kMalformed;
  if (c == '\r')
    state_ = State::kTrailerEnd;
  else if (!is_text(c))
    return Status::kMalformed;
  else
    line_empty_ = false;
  return Status::kMore;
}

BodyFraming::Status BodyFraming::read_frame(char c) {
  switch (state_) {
    case State::kSize: return read_size(c);
    case State::kExtension: return end_size_line(c);
    case State::kTrailer: return read_trailer(c);
    case State::kSizeEnd:
      line_bytes_ = 0;
      line_empty_ = true;
      state_ = left_ == 0 ? State::kTrailer : State::kData;
      return c == '\n' ? Status::kMore : Status::kMalformed;
    case State::kDataCr: state_ = State::kDataLf; return c == '\r' ? Status::kMore : Status::kMalformed;
    case State::kDataLf: state_ = State::kSize; return c == '\n' ? Status::kMore : Status::kMalformed;
    case State::kTrailerEnd:
      state_ = line_empty_ ? State::kEnd : State::kTrailer;
      line_empty_ = true;
      return c == '\n' ? Status::kMore : Status::kMalformed;
    default: return Status::kMalformed;
  }
}

BodyFraming::Status BodyFraming::next(std::string_view& bytes, std::string_view& data) {
  data = {};
  if (state_ == State::kFixed && left_ == 0) state_ = State::kEnd;
  while (state_ != State::kEnd && !bytes.empty() && data.empty()) {
    if (state_ != State::kFixed && state_ != State::kData) {
      const char c = bytes.front();
      bytes.remove_prefix(1);
      if (const Status status = read_frame(c); status != Status::kMore) return status;
      continue;
    }
    data = bytes.substr(0, left_);
    bytes.remove_prefix(data.size());
    left_ -= data.size();
    taken_ += data.size();
    if (left_ == 0) state_ = state_ == State::kFixed ? State::kEnd : State::kDataCr;
  }
  return state_ == State::kEnd ? Status::kDone : Status::kMore;
}

struct BodyReader::Share {
  explicit Share(std::shared_ptr<BodyBudget> budget_in) : budget(std::move(budget_in)) {}
  Share(const Share&) = delete;
  Share& operator=(const Share&) = delete;
  ~Share() { budget->give_back(bytes); }
  const std::shared_ptr<BodyBudget> budget;
  size_t bytes = 0;
};

BodyReader::BodyReader(std::shared_ptr<BodyBudget> budget, std::optional<size_t> content_length, size_t max_bytes)
    : share_(std::make_shared<Share>(std::move(budget))), framing_(content_length, max_bytes) {}

// Doubles, so that the copies add up to less than the body. What is being copied from is not charged.
bool BodyReader::reserve(size_t bytes) {
  if (bytes <= body_.capacity()) return true;
  const size_t wanted = std::max(bytes, std::min(framing_.most(), std::max(kFirstBytes, 2 * body_.capacity())));
  if (!share_->budget->take(wanted - share_->bytes, wanted)) return false;
  share_->bytes = wanted;
  body_.reserve(wanted);
  return true;
}

BodyReader::Status BodyReader::read(std::string_view& bytes) {
  for (;;) {
    std::string_view data;
    const BodyFraming::Status status = framing_.next(bytes, data);
    if (status == BodyFraming::Status::kMalformed) return Status::kMalformed;
    if (status == BodyFraming::Status::kTooLarge) return Status::kTooLarge;
    if (!data.empty() && !reserve(body_.size() + data.size())) return Status::kOverBudget;
    body_.append(data);
    if (status == BodyFraming::Status::kDone) return Status::kDone;
    if (bytes.empty()) return Status::kMore;
  }
}

}  // namespace perigee
