// Package wallclock reads the wall clock of this host, for what a process judges by its own clock: the validity of the
// certificates in its handshakes, the life of what it signs, and its readings of the database's clock.
//
// It decides nothing: leases, expiry and fences are the database's. Durations are measured with package time. In builds
// other than releases a drill gives a process a wrong clock with GPUAAS_CLOCK_OFFSET (a Go duration, or @FILE); a
// build with the tag `release` does not read the variable.
//
// It is a package of its own because services and the agent have the variable in common, and a build with the tag
// `release` replaces what reads it.
package wallclock

import "time"

// Now returns the time of this host's wall clock, shifted by the process's offset if it has one.
func Now() time.Time {
	offset, err := Offset()
	if err != nil {
		return time.Now() // the process refuses to start
	}
	return time.Now().Add(offset)
}
