// Package plans measures how many rows statements of the product read on a fleet of a given size.
//
// A Template holds the rows that the product itself wrote for one machine and one workspace at rest. Load copies its
// rows for as many machines and workspaces as asked, each with ids and names of its own, in every table that has them,
// so that a table which is added later is filled as well. Explain runs a statement as its role, with a generic plan and
// the planner's default settings, and rolls it back.
package plans
