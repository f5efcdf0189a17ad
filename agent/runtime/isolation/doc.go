// Package isolation keeps a workload to its own user, processes, devices and directory on a host that it shares.
//
// It makes the control groups that bound a workload's processes and devices, where the host allows any; the stage in
// which a process drops the agent's rights before it becomes the workload; and directories that only their owner may
// enter. By the same control groups, and without them by session, parent, user and a variable of the run, Tree finds
// every process of a workload and kills them all, also those that left its session.
//
// It never starts, restarts or stops a workload by a decision of its own: package process supervises, and passes what a
// workload may use. Which user id a workspace has is decided by package uid.
package isolation
