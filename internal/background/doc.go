// Package background runs the periodic jobs of a service, each on any one of its replicas.
//
// The database decides when a job is due: mesh.periodic_job has one row per job, and the replica that finds the row due
// moves it by the period and then runs the job. No state depends on a run: a job that is lost, late or run twice
// changes only when something is noticed. If a replica dies during a run, the next run, a period later, does its work.
//
// Guarantees: a job runs on one replica at a time and about once in its period, while any replica lives; the context of
// a run ends after the job's Timeout, and a run delays no other job; if the database cannot be reached, Run waits for
// it; Run returns only when none of its jobs runs, or after its grace. An idle replica queries the database when a job
// is due, and not in between.
//
// It is a package of its own because who runs a job is decided here alone, by rows and locks of the database, and never
// by what the job does: package retention and the services bring the jobs.
package background
