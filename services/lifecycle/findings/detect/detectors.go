package detect

import (
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/findings/scan"
)

// DetectorConfig bounds detectors.
type DetectorConfig struct {
	// Grace is how long after the last change of a row an agent's report is compared with it.
	Grace time.Duration
	// Fresh is how old an agent's report may be.
	Fresh time.Duration
	// ProvisionLimit provisions of one tenant and name within ProvisionWindow are a finding.
	ProvisionWindow time.Duration
	ProvisionLimit  int
	// WokenFor is how long a finding on an instance that was started again stays after it was last refused, or ended.
	WokenFor time.Duration
	// Keep is how long an agent's report is kept, and a refusal.
	Keep time.Duration
}

// Detectors compare rows, resources and reports with each other. Each reads its sources and returns what it sees.
type Detectors struct {
	pool, workloads *pgxpool.Pool
	db              pg.Querier // the pool, or a transaction in which a check reads
	pages           *scan.Pages
	cfg             DetectorConfig
	forgotAt        time.Time // when the sweep last forgot old reports
}

// NewDetectors returns detectors that read the database db in pages, and workloads as its administrator.
func NewDetectors(db, workloads *pgxpool.Pool, pages *scan.Pages, cfg DetectorConfig) *Detectors {
	return &Detectors{pool: db, db: db, workloads: workloads, pages: pages, cfg: cfg}
}

// Over returns detectors that read our rows over q, for checks that only read: in one transaction they cost one commit.
func (d *Detectors) Over(q pg.Querier) *Detectors {
	over := *d
	over.db, over.pages = q, d.pages.Over(q)
	return &over
}
