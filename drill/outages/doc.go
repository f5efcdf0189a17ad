// Package outages has the drills of agents and services that are away, and of databases that come back older.
package outages
