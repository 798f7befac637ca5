// The program's commands. Each takes the words after its name and returns the process's exit code.
#pragma once

#include <string>
#include <vector>

namespace perigee {

int run_serve(const std::vector<std::string>& arguments);
int run_router(const std::vector<std::string>& arguments);
int run_plan(const std::vector<std::string>& arguments);
int run_doctor(const std::vector<std::string>& arguments);
int run_calibrate(const std::vector<std::string>& arguments);
int run_inspect(const std::vector<std::string>& arguments);
int run_bench(const std::vector<std::string>& arguments);  // bench serve | decode | prefill | step

}  // namespace perigee
