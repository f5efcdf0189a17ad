// Package readiness decides from the states that an agent reports whether the workloads of a workspace are ready, are
// still starting, or have ended for good, and whether the tenant or the runtime is the owner of such an end. It reads
// nothing and waits for nothing: the steps of provision do.
package readiness
