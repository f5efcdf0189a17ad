package pg

// Column returns one value of each row, as an argument of unnest.
func Column[R, T any](rows []R, of func(R) T) []T {
	out := make([]T, len(rows))
	for i, r := range rows {
		out[i] = of(r)
	}
	return out
}

// Texts returns the texts that of returns for each row as one argument of unnest for each of them.
func Texts[R any](rows []R, of func(R) []string) []any {
	var columns [][]string
	for i, r := range rows {
		for n, text := range of(r) {
			if i == 0 {
				columns = append(columns, make([]string, len(rows)))
			}
			columns[n][i] = text
		}
	}
	out := make([]any, len(columns))
	for n := range columns {
		out[n] = columns[n]
	}
	return out
}
