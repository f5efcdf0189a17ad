// Package process owns workloads that run as processes of the host, without a container runtime.
//
// It believes the kernel's facts about a process (pid, start time, control group), the files that its shims wrote, and
// completed probes. It never runs a shell line, never lets a workload run with the agent's rights where the agent is
// root, and never decides what should run: tasks do.
//
// Each workload has a shim, which is the agent's own binary in a session of its own. The shim starts the workload,
// restarts it by its policy, and keeps its exit status, whether or not an agent runs. An agent that starts finds shims
// and workloads again by pid, start time, boot and control group, so that a recycled pid is never taken for a workload;
// where a shim died, a new one adopts the workload that outlived it.
//
// What a workload may use on the host, and which processes are its own, is package isolation's; what it writes is kept
// and shown by package output.
//
// A workload that runs when an agent starts is adopted. One that does not, as after a boot, is started only once the
// control plane has listed its epoch (SetRunList), or by a task: until then this host may be one whose epoch was
// replaced.
//
//	agent ── spec.json, desired.json, SIGUSR1 ──► shim ── init stage: drop rights, exec ──► workload
//	  └────────────── state.json, report pipe ◄────┘
//
// Guarantees: a workload's pid is on disk before it may execute; every descendant has ended when a stop returns, also
// those that left its session; one shim at a time supervises a workload (by a lock that it keeps for as long as it
// lives); deploying the same again changes nothing; secrets are in files of mode 0600 inside the agent's own directory
// and in the workload's environment, nowhere else.
package process
