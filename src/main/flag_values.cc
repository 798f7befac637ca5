#include "main/flag_values.h"

#include <map>

namespace perigee {

bool Bytes::read(const std::string& text, int64_t& field) const {
  static const std::map<std::string, double> kUnits = {{"", 1},         {"K", 0x1p10},   {"M", 0x1p20},  {"G", 0x1p30},
                                                       {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}};
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const auto unit = kUnits.find(std::string(end, text.data() + text.size()));
  if (error != std::errc() || unit == kUnits.end() || !(number > 0) || number * unit->second > 0x1p50) return false;
  field = static_cast<int64_t>(number * unit->second);
  return true;
}

bool Counts::read(const std::string& text, std::vector<int64_t>& field) const {
  constexpr int64_t kMost = 1 << 30;
  field.clear();
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    if (!Whole{1, kMost}.read(text.substr(begin, end - begin), field.emplace_back())) return false;
    begin = end + 1;
  }
  return true;
}

}  // namespace perigee
