import { defineConfig } from "vite";

// File names carry no hashes: the assets are committed, and a change should show as a change.
export default defineConfig({
  base: "./",
  build: {
    outDir: "../src/prfaas/gateway/console/assets",
    emptyOutDir: true,
    modulePreload: false,
    rollupOptions: {
      output: {
        entryFileNames: "console.js",
        chunkFileNames: "[name].js",
        assetFileNames: "console[extname]",
      },
    },
  },
});
