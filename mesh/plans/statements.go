package plans

import (
	"regexp"
	"slices"
	"strconv"

	"github.com/gpuaas/mesh/internal/pg"
)

// whole are the statements that read the whole fleet, with the rows that they may read for each workspace. Each runs in
// a sweep every 30 s or more seldom, or when something failed, and none on the way of a request.
var whole = map[string]float64{
	"detect.provisioned_often": 1, // the argument of the test lies before most runs
	"detect.provisions_of":     2, // of names that a finding is about
	"launchlog.live_instances": 1,
	"static.list_slots":        1,
	"static.standing_slots":    1,
	"view.count_nodes":         1,
	"workspace.after":          6, // a batch of an announcement: the tenants are few, and read for each workspace
	// Rebuilding projections reads and writes all of them.
	"project.compare":          44,
	"project.empty_table":      22,
	"project.drop_replaced":    40,
	"project.take_rebuilt":     40,
	"project.compare_reported": 40,
	// Reads all workspaces, and runs by the index of those that are live.
	"project.compare_counts": 10,
	"fleet.compare_counts":   4, // once an hour
	// The reads of a function are not in its plan.
	"project.recount_workspaces": 0, "fleet.recount_counts": 0,
	// Adds up the numbered batches that a cursor has not read: that of the measurement has read none.
	"events.measure_lag": 1,
}

// machines are the statements that read all machines, with the rows that they may read for each.
var machines = map[string]float64{
	"gate.read_nodes_without_key": 2, // while a key of tasks waits for the agents to store it
	"enrol.read_token_of_request": 2, // all tokens of the template have the same empty key
	"tokens.read_needing_key":     2, // while a key of recovery tokens is to be retired
	"profiles.count_reporting":    2, // all nodes of the template report the same version
	"profiles.list":               2,
}

// PageSize is how many workspaces, nodes or rows of a kind the statements of sweeps read at a time.
const PageSize = 500

// paged are the statements that read a page of the fleet, with the rows that they may read for each of it.
var paged = map[string]float64{
	"detect.claimed_schemas":     7,
	"detect.contradictions":      25, // compares the tables of holds, claims and instances with each other
	"detect.devices_of_released": 10,
	"drift.due_reporting":        6,
	"scan.end_of_page":           1,
	"detect.forget_reports":      2,
	"detect.fresh_reports":       3,
	"guard.misfits":              1, // reads every row that has a seal
	"detect.standing_by_rows":    6,
}

// flat are statements of loops that find almost no rows on a fleet at rest, with the rows that they may read of a fleet
// of any size.
var flat = map[string]int64{
	"identity.read_nodes_that_need_key": 50,
	"watchdog.forget_sessions":          50,
}

// joined are the lists whose rows are each made of many tables, with the rows that one of theirs may read.
var joined = map[string]int64{
	"view.list_nodes":      20, // identity, gate, sessions, replicas, allocations
	"view.list_workspaces": 12, // those, and runs with their steps, and what is observed
}

// few is how many rows any statement may read beside those that it returns.
const few = 100

// Most returns how many rows a statement may read on a fleet to return returned rows.
func Most(s *pg.Statement, size Size, returned int64) int64 {
	if perWorkspace, ok := whole[s.Name()]; ok {
		// A workspace that has ended was recreated once, and has twice the rows.
		return int64(perWorkspace*float64(size.Workspaces+2*size.Ended)) + 10*few
	}
	if perMachine, ok := machines[s.Name()]; ok {
		return int64(perMachine*float64(size.Nodes)) + 10*few
	}
	if most, ok := flat[s.Name()]; ok {
		return most
	}
	if perRow, ok := paged[s.Name()]; ok {
		return int64(perRow*PageSize) + 10*few
	}
	return max(10, joined[s.Name()]) * (returned + few)
}

// Class is the requirement on a statement as the fleet grows.
type Class struct {
	Name   string
	Growth float64 // the exponent by which buffers may grow with the fleet
	InTime float64 // the exponent by which the median of its time may grow
	Reason string  // why it is in no stricter class; empty for those of requests and loops
}

// The classes of statements.
var (
	point = Class{Name: "request", Growth: 0.2, InTime: 0.2}
	loop  = Class{
		Name: "loop", Growth: 0.2, InTime: 0.2,
		Reason: "finds next to nothing on a fleet at rest, or reads a page of fixed size",
	}
)

// The reasons of classes.
const (
	aggregate = "is a sum or a list over all of the fleet"
	repair    = "runs while something is repaired or made anew"
	seldom    = "a sweep of many seconds that compares all of the fleet"
)

// reasons has, for each statement that reads the whole fleet, the reason why it may.
var reasons = map[string]string{
	"detect.provisioned_often": seldom, "detect.provisions_of": seldom, "launchlog.live_instances": seldom,
	"static.list_slots": seldom, "static.standing_slots": seldom,
	"gate.read_nodes_without_key": repair, "view.count_nodes": aggregate,
	"enrol.read_token_of_request": "finds a token by its key; all copies of the template have the same",
	"tokens.read_needing_key":     repair,
	"profiles.count_reporting":    aggregate,
	"profiles.list":               aggregate,
	"workspace.after":             repair, "project.compare": repair, "project.empty_table": repair,
	"project.drop_replaced": repair, "project.compare_counts": repair,
	"project.take_rebuilt": repair, "project.compare_reported": repair, "project.recount_workspaces": repair,
	"fleet.compare_counts": seldom, "fleet.recount_counts": repair,
	"events.measure_lag": aggregate,
}

// ClassOf returns the class of a statement: a list may grow with the fleet and not faster, a request or a loop hardly.
func ClassOf(s *pg.Statement) Class {
	if Whole(s) {
		list := Class{Name: "list", Growth: 1.1, InTime: 1.1, Reason: reasons[s.Name()]}
		if list.Reason == repair {
			list.InTime = 2.5 // what it sorts, deletes and writes fits in shared_buffers on a small fleet alone
		}
		return list
	}
	_, still := flat[s.Name()]
	if Paged(s) || still {
		return loop
	}
	return point
}

// Whole reports whether a statement reads the whole fleet.
func Whole(s *pg.Statement) bool {
	_, all := whole[s.Name()]
	_, each := machines[s.Name()]
	return all || each
}

// Paged reports whether a statement reads a page of the fleet, of PageSize workspaces, nodes or rows.
func Paged(s *pg.Statement) bool {
	_, ok := paged[s.Name()]
	return ok
}

// bound finds how many rows a statement takes at most: a parameter, which Arguments makes a page, or a number.
var bound = regexp.MustCompile(`\bLIMIT (?:\$\d+|(\d+))`)

// Bounds returns the row limits of a statement, with the arguments of Arguments and without limits of one row.
func Bounds(s *pg.Statement) []int64 {
	var out []int64
	for _, match := range bound.FindAllStringSubmatch(s.SQL(), -1) {
		n := int64(PageSize)
		if match[1] != "" {
			n, _ = strconv.ParseInt(match[1], 10, 64) // digits
		}
		if n > 1 {
			out = append(out, n)
		}
	}
	return out
}

// Measured returns the statements of services that can be planned on a migrated database.
func Measured() []*pg.Statement {
	return slices.DeleteFunc(pg.Statements(), func(s *pg.Statement) bool {
		role := s.Roles()[0]
		return s.Unprepared() != "" || role == pg.RoleOwner || role == pg.RoleWorkloadAdmin
	})
}
