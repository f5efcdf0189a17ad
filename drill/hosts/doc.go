// Package hosts has the drills of hosts that change: GPUs and drivers, addresses, clocks, versions, disks.
package hosts
