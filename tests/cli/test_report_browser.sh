# The pages of `tenure report` in a headless Chromium: what report_page_checks.py looks at.
# Pages and screenshots stay in report_pages of the build folder.
if grep -q '^TENURE_SANITIZE:[A-Z]*=.' "$1/CMakeCache.txt"; then
    echo "a build with a sanitizer: the pages are those of a build without"
    exit 77
fi
for name in chromium-headless-shell chromium chromium-browser google-chrome; do
    browser=$(command -v "$name") && break
done
[ -n "$browser" ] || { echo "no Chromium here"; exit 77; }
exec python3 "$2/tests/cli/report_page_checks.py" "$1/tenure" "$browser" "$1/report_pages"
