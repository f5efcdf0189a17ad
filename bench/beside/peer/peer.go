// Package peer defines the requests to the process of another engine, and its responses. It imports nothing, so that
// the module of the other engines shares it with the product and neither has the other's dependencies.
package peer

import "time"

// Setup is the configuration of the process of another engine at its start.
type Setup struct {
	AdminURL string `json:"admin_url"` // connection string of the superuser
	Database string `json:"database"`  // made at the start
	// Workers is how many jobs River works at once; DBOS runs each workflow in its caller's process at once.
	Workers  int           `json:"workers,omitempty"`
	Cooldown time.Duration `json:"cooldown,omitempty"` // River: the least time between two fetches; zero: its default
}

// Described is an engine's description of itself: its version and its settings.
type Described struct {
	Version  string         `json:"version"`
	Settings map[string]any `json:"settings"`
}

// Load is the load of a stretch.
type Load struct {
	Length      time.Duration `json:"length"`
	Clients     int           `json:"clients"`
	Outstanding int           `json:"outstanding"` // units that are begun and not done, at most; zero: one for each client
}

// Stretch is one measured stretch.
type Stretch struct {
	Units    int           `json:"units"` // done
	Took     time.Duration `json:"took"`  // until the last of them was done
	P50, P99 float64       // from the begin of a unit to its end, ms
}

// Rate returns how many units were done a second.
func (s Stretch) Rate() float64 {
	if s.Took <= 0 {
		return 0
	}
	return float64(s.Units) / s.Took.Seconds()
}
