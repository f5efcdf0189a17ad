// Package failpoint implements named points at which a test may kill, stall or fail a process.
//
// A point is armed from outside by GPUAAS_FAILPOINTS (`name=action[,name=action]`), so that a drill kills the real
// binary exactly between two effects. A name that ends in `*` arms every point whose name has that prefix, each until
// the report lists it: a test that starts the process again and again meets each point once. A point that is not armed
// has no effect. With GPUAAS_FAILPOINT_REPORT set, hits of armed points are appended to that file before the action is
// taken, so that a run can prove which of its points were reached. Builds with the tag `release` carry none of this.
//
// It is a package of its own because any other may have a point in it: it imports nothing of this module, and a build
// with the tag `release` replaces it whole.
package failpoint
