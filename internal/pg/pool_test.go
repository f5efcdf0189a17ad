package pg_test

import (
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/pg"
)

// TestIdleConnectionsOfAPool checks how long a pool keeps connections that are not used: as long as the connection
// string says, else a minute. Nothing is dialed.
func TestIdleConnectionsOfAPool(t *testing.T) {
	for query, want := range map[string][2]time.Duration{
		"": {time.Minute, 15 * time.Second},
		"?pool_max_conn_idle_time=20s&pool_health_check_period=1s": {20 * time.Second, time.Second},
	} {
		pool, err := pg.Open(t.Context(), pg.Config{URL: "postgres://user@127.0.0.1:1/mesh" + query})
		if err != nil {
			t.Fatal(err)
		}
		is := pool.Config()
		pool.Close()
		if got := [2]time.Duration{is.MaxConnIdleTime, is.HealthCheckPeriod}; got != want {
			t.Errorf("with %q connections are kept for %s and looked at every %s, want %v", query, got[0], got[1], want)
		}
	}
}
