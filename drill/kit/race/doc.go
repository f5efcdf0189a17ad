// Package race lets many people ask at the same instant for the recreation of one workspace, alone and beside other
// disturbances: a lock store that is flushed, a watchdog that asks too, a replica that is stopped for longer than its
// lease.
//
// It decides what a race is (enough requests in flight at once), and whether one ended as it must: one operation for
// all, one launch for each epoch, no two instances. It does not decide which races a drill has.
package race
