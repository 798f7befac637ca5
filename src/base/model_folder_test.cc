#include "base/model_folder.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "base/temp_folder.h"

namespace perigee {
namespace {

namespace fs = std::filesystem;

std::string refusal(const std::string& folder, const std::string& name) {
  const auto text = read_in_folder(folder, name, 100);
  return text.ok() ? "read: " + *text : text.error().message;
}

TEST(ModelFolder, LinksInsideAreFollowedAndLinksOutAreNot) {
  const TempFolder outside, folder;
  const std::string secret = outside.write("secret", "hidden"), in = folder.path() + "/";
  folder.write("plain", "open");
  fs::create_symlink("plain", in + "inner");
  fs::create_symlink("inner", in + "inner_twice");
  fs::create_symlink(secret, in + "out");
  fs::create_symlink("out", in + "out_twice");
  fs::create_symlink(outside.path(), in + "out_folder");
  fs::create_symlink("nowhere", in + "dangling");
  fs::create_symlink("loop", in + "loop");
  for (const char* name : {"plain", "inner", "inner_twice"}) EXPECT_EQ(refusal(folder.path(), name), "read: open");
  for (const char* name : {"out", "out_twice", "out_folder"})
    EXPECT_NE(refusal(folder.path(), name).find("the link leaves the model folder"), std::string::npos) << name;
  for (const char* name : {"out_folder/secret", "../secret", "/etc/passwd", "..", ""})
    EXPECT_NE(refusal(folder.path(), name).find("must be a name inside the folder, without a path"), std::string::npos)
        << name;
  for (const char* name : {"dangling", "loop", "absent"})
    EXPECT_EQ(refusal(folder.path(), name).find("read: "), std::string::npos) << name;
  // What is there but cannot be read is not taken for a file that the model does without.
  for (const char* name : {"out", "dangling", "loop"}) EXPECT_TRUE(folder_has(folder.path(), name)) << name;
  EXPECT_FALSE(folder_has(folder.path(), "absent"));
}

// The folder that the user names may itself be a link; only what it holds is not trusted.
TEST(ModelFolder, TheFolderItselfMayBeALink) {
  const TempFolder folder, other;
  folder.write("plain", "open");
  fs::create_symlink(folder.path(), other.path() + "/model");
  EXPECT_EQ(refusal(other.path() + "/model", "plain"), "read: open");
}

TEST(ModelFolder, SnapshotsMayLinkToTheBlobsOfTheirOwnModel) {
  const TempFolder cache;
  for (const char* model : {"models--a--x", "models--a--y"})
    for (const char* sub : {"blobs", "snapshots/1"}) fs::create_directories(fs::path(cache.path()) / model / sub);
  cache.write("models--a--x/blobs/11", "mine");
  cache.write("models--a--y/blobs/22", "other");
  const std::string snapshot = cache.path() + "/models--a--x/snapshots/1";
  fs::create_symlink("../../blobs/11", snapshot + "/mine");
  fs::create_symlink("../../../models--a--y/blobs/22", snapshot + "/other");
  EXPECT_EQ(refusal(snapshot, "mine"), "read: mine");
  EXPECT_NE(refusal(snapshot, "other").find("leaves the model folder"), std::string::npos);
}

}  // namespace
}  // namespace perigee
