#include "grammar/schema_names.h"

#include <gtest/gtest.h>

#include <initializer_list>
#include <tuple>

namespace perigee {
namespace {

TEST(SchemaNames, ReferencesAreResolvedAsUris) {
  for (const auto& [base, ref, uri] : std::initializer_list<std::tuple<const char*, const char*, const char*>>{
           {"http://a/b/c/d;p?q", "g:h", "g:h"},  // of RFC 3986, section 5.4
           {"http://a/b/c/d;p?q", "g", "http://a/b/c/g"},
           {"http://a/b/c/d;p?q", "./g", "http://a/b/c/g"},
           {"http://a/b/c/d;p?q", "g/", "http://a/b/c/g/"},
           {"http://a/b/c/d;p?q", "/g", "http://a/g"},
           {"http://a/b/c/d;p?q", "//g", "http://g"},
           {"http://a/b/c/d;p?q", "", "http://a/b/c/d;p?q"},
           {"http://a/b/c/d;p?q", ".", "http://a/b/c/"},
           {"http://a/b/c/d;p?q", "..", "http://a/b/"},
           {"http://a/b/c/d;p?q", "../g", "http://a/b/g"},
           {"http://a/b/c/d;p?q", "../../../g", "http://a/g"},
           {"http://a", "g", "http://a/g"},
           {"", "item.json", "item.json"},
           {"x/root.json", "item.json", "x/item.json"}})
    EXPECT_EQ(resolved_uri(base, ref), uri) << base << " and " << ref;
}

TEST(SchemaNames, APartIsFoundByPointerAnchorAndId) {
  const Json root = *parse_json(
      R"({"$id":"https://e.com/s/root.json","$defs":{"p":{"$anchor":"n","const":0},
          "a":{"$id":"a/item","const":1,"$defs":{"in":{"$anchor":"n","const":2}}},"b":{"$id":"/b/item","const":3}}})");
  const SchemaNames names(root);
  for (const auto& [ref, value] : std::initializer_list<std::pair<const char*, int>>{{"#/$defs/p", 0},
                                                                                     {"root.json#/$defs/p", 0},
                                                                                     {"#n", 0},
                                                                                     {"a/item", 1},
                                                                                     {"a/item#n", 2},
                                                                                     {"a/item#/$defs/in", 2},
                                                                                     {"https://e.com/b/item", 3}}) {
    const Json* found = names.find(ref);
    ASSERT_NE(found, nullptr) << ref;
    EXPECT_EQ(*found->find("const"), Json(value)) << ref;
  }
  EXPECT_EQ(names.find(""), &root);
  EXPECT_EQ(names.find("#"), &root);
  for (const char* ref : {"item", "b/item", "https://f.com/b/item", "a/item#m", "b/item#n", "#/$defs/x", "root.json#x"})
    EXPECT_EQ(names.find(ref), nullptr) << ref;
}

// Else each anchor below a long $id would have a copy of that.
TEST(SchemaNames, LongUrisNameNothing) {
  for (const size_t size : {1024u, 1025u}) {
    const std::string id(size, 'i');
    const Json root = *parse_json(R"({"$id":")" + id + R"(","$defs":{"x":{"$anchor":"n"},"y":{"$id":"/y"}}})");
    const SchemaNames names(root);
    EXPECT_NE(names.find("#/$defs/x"), nullptr) << "a place needs no name";
    EXPECT_EQ(names.find("#n") != nullptr, size == 1024) << size;
    EXPECT_EQ(names.find("/y") != nullptr, size == 1024) << size;
  }
}

// A value is no schema, whatever its members are called, and a property may be called as a keyword is.
TEST(SchemaNames, DataHasNoNames) {
  const Json root = *parse_json(
      R"({"enum":[{"$anchor":"n","const":0}],"const":{"$id":"i","const":0},"$defs":{"x":{"$anchor":"n","const":1}},
          "properties":{"const":{"$id":"i","const":2},"$id":{"type":"string"},"$anchor":{"const":3}}})");
  const SchemaNames names(root);
  EXPECT_EQ(*names.find("#n")->find("const"), Json(1));
  EXPECT_EQ(*names.find("i")->find("const"), Json(2));
}

}  // namespace
}  // namespace perigee
