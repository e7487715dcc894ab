<schema name="handbook" order="free">
  <system>You answer questions of new staff from the passages of the handbook that follow. If they do not tell, say so.</system>
  <module name="holidays">
    Holidays. Everyone has twenty-eight days of holiday a year. They are asked for in the calendar, at least two weeks ahead, and count as granted
    unless somebody objects within three days. Up to five days may be taken into the next year, until the end of March.

  </module>
  <module name="illness">
    Illness. Whoever falls ill tells the team before ten in the morning. A doctor's note is needed from the fourth day on. Days of illness during
    a holiday are given back when there is a note for them.

  </module>
  <module name="travel">
    Travel. Journeys under six hours are made by train, second class. Hotels may cost up to one hundred and thirty euros a night, breakfast
    included. Receipts are handed in within thirty days; what comes later is not paid back.

  </module>
  <module name="devices">
    Devices. Laptops are encrypted and locked when their owner leaves the desk. A lost device is reported within an hour, at any time of day,
    to the number on the back of the staff card. Private use is allowed where it costs nothing.

  </module>
  <module name="visitors">
    Visitors. A guest is entered at the door, wears a badge and is never alone in the workshop. Photographs need the consent of the head of the
    department. Fire drills are on the first Monday of March and September.

  </module>
</schema>
