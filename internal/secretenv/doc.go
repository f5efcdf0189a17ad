// Package secretenv owns the environment values of workloads wherever the control plane keeps them: sealed in a stored
// spec and in a queued task, open in the task that is signed for an agent, and absent from all responses to people and
// all events, which have the names alone.
//
// It trusts its key file. It never decides which variables a workload may have, and never logs a value or names one in
// an error.
//
// Guarantees: a value opens only for the tenant, workspace, workload, purpose and name for which it was sealed, and
// only whole. A value that does not open is a typed refusal, so that no workload is started with a part of its
// variables. Each value is sealed under the first key of the set, names its key, and opens as long as that key is in
// the set.
package secretenv
