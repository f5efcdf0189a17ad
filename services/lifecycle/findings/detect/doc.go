// Package detect compares rows, agents' reports and placements' lists with each other, and returns the contradictions
// that it sees. Each detector reads its sources in an order in which work under way does not look broken, and skips
// workspaces with a live run. If a source does not answer, it returns an error and concludes nothing.
//
// It keeps what it compares with later: agents' last reports, and the instances that recovery refused. It writes no
// finding, and changes no row that it compares.
package detect
