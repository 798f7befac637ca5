// The limit of a container, from folders laid out as the kernel does.
#include "base/cgroup.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "base/temp_folder.h"

namespace perigee {
namespace {

constexpr int64_t kNone = INT64_MAX;

class Cgroup : public testing::Test {
 protected:
  void write(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = root() + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  void in_groups(const std::string& lines) const { write("/proc/self/cgroup", lines); }
  int64_t limit() const { return cgroup_memory_bytes(root()); }
  int64_t cores() const { return cgroup_cores(root()); }

  const std::string& root() const { return folder_.path(); }

  const TempFolder folder_;
};

TEST_F(Cgroup, NoneOfAnyKind) {
  EXPECT_EQ(limit(), kNone);
  in_groups("0::/\n");
  EXPECT_EQ(limit(), kNone);
}

TEST_F(Cgroup, V2AsAContainerSeesIt) {
  in_groups("0::/\n");
  write("/sys/fs/cgroup/memory.max", "4294967296\n");
  EXPECT_EQ(limit(), 4294967296);
  std::filesystem::remove(root() + "/proc/self/cgroup");
  EXPECT_EQ(limit(), 4294967296) << "without /proc";
}

TEST_F(Cgroup, V2TheLowestOfNestedGroupsCounts) {
  in_groups("0::/system.slice/perigee.service\n");
  write("/sys/fs/cgroup/system.slice/perigee.service/memory.max", "max\n");
  EXPECT_EQ(limit(), kNone);
  write("/sys/fs/cgroup/system.slice/memory.max", "3000\n");
  EXPECT_EQ(limit(), 3000) << "of the group above";
  write("/sys/fs/cgroup/system.slice/perigee.service/memory.max", "2000\n");
  EXPECT_EQ(limit(), 2000);
  write("/sys/fs/cgroup/system.slice/memory.max", "1000\n");
  EXPECT_EQ(limit(), 1000);
  write("/sys/fs/cgroup/other.slice/memory.max", "10\n");
  EXPECT_EQ(limit(), 1000) << "of another group";
}

TEST_F(Cgroup, V2GroupsThatAreNotThereArePassedOver) {
  in_groups("0::/../outside/a:b\n");
  write("/sys/fs/cgroup/memory.max", "7000\n");
  EXPECT_EQ(limit(), 7000);
  write("/sys/fs/cgroup/outside/a:b/memory.max", "6000\n");
  EXPECT_EQ(limit(), 6000) << "a name may hold a colon";
}

TEST_F(Cgroup, V1) {
  in_groups("12:cpu,cpuacct:/docker/x\n5:hugetlb,memory:/docker/x\n1:name=memory:/y\n");
  write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(limit(), 9223372036854771712) << "v1's word for none: the machine's memory is less";
  write("/sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes", "5000\n");
  write("/sys/fs/cgroup/memory/y/memory.limit_in_bytes", "10\n");
  EXPECT_EQ(limit(), 5000);
  write("/sys/fs/cgroup/memory/docker/memory.limit_in_bytes", "4000\n");
  EXPECT_EQ(limit(), 4000);
  write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "3000\n");
  EXPECT_EQ(limit(), 3000);
}

TEST_F(Cgroup, GarbageIsNoLimit) {
  for (const char* text : {"", "\n", "max\n", "12abc\n", "-5\n", "0\n", "99999999999999999999\n", " 5\n", "\xff\xfe"}) {
    write("/sys/fs/cgroup/memory.max", text);
    EXPECT_EQ(limit(), kNone) << text;
  }
  for (const char* text : {"", "0\n", "0:\n", "::::\n", "0::\n", "0::relative\n", "5:memory:\n", "\xff\n"}) {
    in_groups(text);
    EXPECT_EQ(limit(), kNone) << text;
  }
  std::filesystem::remove(root() + "/sys/fs/cgroup/memory.max");
  std::filesystem::create_directories(root() + "/sys/fs/cgroup/memory.max");
  EXPECT_EQ(limit(), kNone) << "a folder";
}

TEST_F(Cgroup, CoresOfV2) {
  in_groups("0::/system.slice/perigee.service\n");
  EXPECT_EQ(cores(), kNone);
  write("/sys/fs/cgroup/system.slice/perigee.service/cpu.max", "max 100000\n");
  EXPECT_EQ(cores(), kNone);
  write("/sys/fs/cgroup/system.slice/perigee.service/cpu.max", "800000 100000\n");
  EXPECT_EQ(cores(), 8);
  write("/sys/fs/cgroup/system.slice/cpu.max", "125000 50000\n");
  EXPECT_EQ(cores(), 2) << "two and a half, of the group above";
  write("/sys/fs/cgroup/cpu.max", "1000 100000\n");
  EXPECT_EQ(cores(), 1) << "never none";
  EXPECT_EQ(limit(), kNone);
}

TEST_F(Cgroup, CoresOfV1) {
  in_groups("12:cpu,cpuacct:/docker/x\n3:cpuset:/y\n");
  write("/sys/fs/cgroup/cpu/docker/x/cpu.cfs_quota_us", "-1\n");
  write("/sys/fs/cgroup/cpu/docker/x/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(cores(), kNone);
  write("/sys/fs/cgroup/cpu/docker/x/cpu.cfs_quota_us", "400000\n");
  EXPECT_EQ(cores(), 4);
}

TEST_F(Cgroup, GarbageIsNoLimitOfCores) {
  for (const char* text :
       {"", "\n", "max\n", "100000\n", "1 0\n", "0 1\n", "a b\n", "100000 100000 1\n", "-1 100000\n"}) {
    write("/sys/fs/cgroup/cpu.max", text);
    EXPECT_EQ(cores(), kNone) << text;
  }
}

TEST(AvailableCores, AreAtLeastOne) {
  EXPECT_GE(available_cores(), 1);
  EXPECT_LE(available_cores(), cgroup_cores());
}

}  // namespace
}  // namespace perigee
