package reconnect

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"

	"github.com/gpuaas/mesh/mesh/topology"
)

// counters are the metrics of a replica of nodeapi that say what became of connections.
var counters = []string{
	"gpuaas_agent_connections_shed_total", "gpuaas_agent_handshakes_refused_total", "gpuaas_agent_refusals_total",
	"gpuaas_agent_openings_stalled_total",
}

// addCounts adds what a replica has counted since its start.
func addCounts(ctx context.Context, ops string, o *outage) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+ops+"/metrics", http.NoBody)
	if err != nil {
		return fmt.Errorf("read the metrics of %s: %w", ops, err)
	}
	resp, err := topology.OneRequest().Do(req)
	if err != nil {
		return fmt.Errorf("read the metrics of %s: %w", ops, err)
	}
	defer resp.Body.Close()
	if o.counts == nil {
		o.counts = map[string]int{}
	}
	return readCounts(resp.Body, o.counts)
}

// readCounts adds the counters in the text of metrics that are not zero.
func readCounts(text io.Reader, into map[string]int) error {
	lines := bufio.NewScanner(text)
	for lines.Scan() {
		for _, name := range counters {
			rest, ok := strings.CutPrefix(lines.Text(), name)
			if !ok {
				continue
			}
			labels, value, _ := strings.Cut(rest, " ")
			n, err := strconv.ParseFloat(value, 64)
			if err != nil {
				return fmt.Errorf("read the metric %s: %w", name, err)
			}
			if n > 0 {
				into[strings.TrimSuffix(strings.TrimPrefix(name, "gpuaas_agent_"), "_total")+labels] += int(n)
			}
		}
	}
	return lines.Err()
}
