// Package firsthour repeats docs/first-hour.md: each command of the page is run on a terminal of 80 columns against a mesh that `gpuaas dev` brings up,
// and what it prints is compared with what the page shows.
//
// `make first-hour` writes the page's output anew. The package has tests only.
package firsthour
