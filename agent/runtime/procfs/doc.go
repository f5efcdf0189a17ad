// Package procfs identifies processes of this host by what the kernel says of them in /proc.
//
// A pid is recycled, and a pid with its start time is not within one boot: BootID names the boot. All signals go to a
// process that was compared with its identity through a handle on it. The package decides nothing about a process and
// knows no workload.
package procfs
