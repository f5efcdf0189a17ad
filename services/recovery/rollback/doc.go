// Package rollback owns rollback mode: the one row that records that the database is older than what nodes or the
// launch log remember.
//
// The schema's owner sets the mode with `gpuaas migrate restored`, which raises the era with it. Recovery sets it on
// evidence: a number that is not of an earlier era than the database's and that the database has never given. Numbers
// of earlier eras are expected after a restore that was declared: they are adopted, and do not set the mode. A person
// ends the mode; if there was evidence, the era is raised above it in the same transaction, so that no number of the
// lost history is given twice.
//
// Guarantees: the row and its incident change in one transaction; there is one incident for one mode; evidence that is
// reported again is counted, once a minute, and never stored twice.
package rollback
